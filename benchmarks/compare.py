"""Say what differs between two results by more than the noise: ratios and measured numbers with disjoint intervals.

An interval is of the rounds of one run. Two runs of the same code differ by more, above all in measured numbers,
because the machine is never the same twice; so a change of a ratio says more. Facts, such as waits, have no interval: a
difference of 20 % is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import LEAST_COVERAGE, WIDEST_SPREAD, Measured, Numbers, Ratio, Result, read


class IncomparableError(Exception):
    """Two paths without results of a common benchmark, or a result that answers nothing."""


class _Entry(NamedTuple):
    median: float
    interval: tuple[float, float] | None
    unit: str
    larger: bool  # is better


def compare(first: Path, second: Path, names: Sequence[str]) -> list[str]:
    """Return a line for each number that changed, and counts of the others. Each path is a file or a folder.

    Raises:
        IncomparableError: a file is no result, or a quick one, or the paths have no benchmark in common.
    """
    before, after = _results(first, names), _results(second, names)
    both = [name for name in before if name in after]
    if not both:
        raise IncomparableError(f"expected results of a common benchmark; {first} and {second} have none")
    return [line for name in both for line in _differences(before[name], after[name])]


def _results(path: Path, names: Sequence[str]) -> dict[str, Result]:
    files = [path / f"{name}.json" for name in names] if path.is_dir() else [path]
    results = {}
    for file in filter(Path.is_file, files):
        try:
            result = read(file)
        except msgspec.DecodeError as error:
            raise IncomparableError(f"{file}: expected a result of the harness: {error}") from None
        if result.quick:
            raise IncomparableError(f"{file}: expected a result, got one of --quick, whose numbers answer nothing")
        results[result.benchmark] = result
    return results


def _differences(before: Result, after: Result) -> Iterator[str]:
    yield f"{before.benchmark}: {_made(before)} -> {_made(after)}"
    for name in before.hardware | after.hardware:
        machines = [result.hardware.get(name, "unknown") for result in (before, after)]
        if machines[0] != machines[1]:
            yield f"  {name} differs: {machines[0]} -> {machines[1]}"
    for kind, entries in (("ratios", _ratios), ("measured numbers", _measured)):
        yield from _changes(entries(before), entries(after), kind)
    facts, others = dict(_facts(before)), dict(_facts(after))
    for key in (key for key in facts if key in others):
        if abs(facts[key] - others[key]) > WIDEST_SPREAD * max(abs(facts[key]), abs(others[key])):
            yield f"  {key}: {facts[key]:.3g} -> {others[key]:.3g}, a fact without an interval"


def _changes(before: Mapping[str, _Entry], after: Mapping[str, _Entry], kind: str) -> Iterator[str]:
    num_same = num_unknown = 0
    for key in (key for key in before if key in after):
        one, other = before[key], after[key]
        if one.interval is None or other.interval is None or (one.unit, one.larger) != (other.unit, other.larger):
            num_unknown += 1
        elif one.interval[1] < other.interval[0] or other.interval[1] < one.interval[0]:
            better = (other.median > one.median) == one.larger
            yield f"  {key}: {one.median:.3g} -> {other.median:.3g}{one.unit}, {'better' if better else 'worse'}"
        else:
            num_same += 1
    yield f"  {num_same} {kind} did not change beyond noise, {num_unknown} cannot tell: too few rounds, or another unit"
    if single := sorted(before.keys() ^ after.keys()):
        yield f"  in one of the two alone: {', '.join(single)}"


def _made(result: Result) -> str:
    return f"{result.date or 'date unknown'}, {result.commit or 'commit unknown'}"


def _ratios(result: Result) -> dict[str, _Entry]:
    return {
        f"{numbers.case}: {ratio.of} / {ratio.to}": _entry(numbers, ratio, "")
        for numbers in result.cases
        for ratio in numbers.ratios
    }


def _measured(result: Result) -> dict[str, _Entry]:
    return {
        f"{numbers.case}: {name}": _entry(numbers, measured, f" {numbers.unit}")
        for numbers in result.cases
        for name, measured in numbers.measured.items()
    }


def _entry(numbers: Numbers, of: Ratio | Measured, unit: str) -> _Entry:
    """Leave an interval out that contains the median too rarely, unless the numbers hardly change."""
    tells = numbers.exact or of.coverage is None or of.coverage >= LEAST_COVERAGE
    return _Entry(of.median, of.interval if tells else None, unit, numbers.larger_is_better)


def _facts(result: Result) -> Iterator[tuple[str, float]]:
    """Yield the numbers among the facts of all cases."""
    for numbers in result.cases:
        yield from _numbers_in(numbers.facts, f"{numbers.case}:")


def _numbers_in(facts: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value, f"{path} {name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path} {name}", value
