"""The results of the GPU check as a page of markdown; without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VERDICTS = {"passed": "passed", "short": "passed, goals not reached", "failed": "FAILED", "cpu": "ran on a CPU"}


def verdict(result: Mapping[str, Any]) -> str:
    """Judge a part: a key of `VERDICTS`."""
    if result["failures"]:
        return "failed"
    if result["hardware"].get("device") == "cpu":
        return "cpu"
    return "short" if result["short"] else "passed"


def render(results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Write the page: a row for each part, then all numbers of each part."""
    return "\n".join(_lines(results, titles)) + "\n"


def _lines(results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> Iterator[str]:
    yield "# GPU check"
    yield ""
    yield from _hardware(results)
    yield ""
    yield "| part | question | verdict | seconds |"
    yield "|---|---|---|---|"
    for name, title in titles.items():
        result = results.get(name)
        if result is None:
            yield f"| {name} | {title} | not run | |"
        else:
            yield f"| {name} | {title} | {VERDICTS[verdict(result)]} | {result['seconds']} |"
    yield ""
    yield "## Failures and goals not reached"
    yield ""
    fallen = [
        f"- {name}: {kind}{_cell(words)}"
        for name, result in results.items()
        for kind, key in (("FAILED: ", "failures"), ("goal not reached: ", "short"))
        for words in result[key]
    ]
    yield from fallen or ["None."]
    for name, title in titles.items():
        if name in results:
            yield from _part(name, title, results[name])


def _hardware(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Name each machine once; parts of a page may be of several runs."""
    machines: dict[str, list[str]] = {}
    for name, result in results.items():
        words = ", ".join(f"{key} {value}" for key, value in result["hardware"].items()) or "unknown: no part started"
        machines.setdefault(words, []).append(name)
    for words, names in machines.items():
        yield f"- {words}" if len(machines) == 1 else f"- {', '.join(names)}: {words}"
    if any(result["hardware"].get("device") == "cpu" for result in results.values()):
        yield "- **A CPU ran the same code with small models. No number of such a part is a number of a GPU.**"


def _part(name: str, title: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {name}: {title}"
    yield ""
    yield f"{result['at']}, {result['seconds']} s."
    for note in result["notes"]:
        yield ""
        yield _cell(note)
    for table, rows in result["tables"].items():
        columns = list(rows[0])
        yield ""
        yield f"### {table}"
        yield ""
        yield f"| {' | '.join(columns)} |"
        yield "|---" * len(columns) + "|"
        for row in rows:
            yield f"| {' | '.join(_cell(row.get(column, '')) for column in columns)} |"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "/").split())
