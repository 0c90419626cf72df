"""Say which ratios of two results differ by more than the noise: the intervals of their medians do not overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import Numbers, Ratio, Result, read


class IncomparableError(Exception):
    """Two paths without results of a common benchmark."""


def compare(first: Path, second: Path, names: Sequence[str]) -> list[str]:
    """Return a line for each ratio that changed, and counts of the others. Each path is a file or a folder.

    Raises:
        IncomparableError: a file is no result, or the paths have no benchmark in common.
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
        results[result.benchmark] = result
    return results


def _differences(before: Result, after: Result) -> Iterator[str]:
    yield f"{before.benchmark}: {_made(before)} -> {_made(after)}"
    for name in before.hardware | after.hardware:
        machines = [result.hardware.get(name, "unknown") for result in (before, after)]
        if machines[0] != machines[1]:
            yield f"  {name} differs: {machines[0]} -> {machines[1]}"
    ratios, others = _ratios(before), _ratios(after)
    same, unknown = 0, 0
    for key in (key for key in ratios if key in others):
        (numbers, one), (_, other) = ratios[key], others[key]
        if one.interval is None or other.interval is None:
            unknown += 1
        elif one.interval[1] < other.interval[0] or other.interval[1] < one.interval[0]:
            better = (other.median > one.median) == numbers.larger_is_better
            yield f"  {key}: {one.median:.3g} -> {other.median:.3g}, {'better' if better else 'worse'}"
        else:
            same += 1
    yield f"  {same} ratios did not change beyond noise, {unknown} have no interval"
    if single := sorted(ratios.keys() ^ others.keys()):
        yield f"  in one of the two alone: {', '.join(single)}"


def _made(result: Result) -> str:
    return f"{result.date or 'date unknown'}, {result.commit or 'commit unknown'}{', quick' if result.quick else ''}"


def _ratios(result: Result) -> dict[str, tuple[Numbers, Ratio]]:
    return {
        f"{numbers.case}: {ratio.of} / {ratio.to}": (numbers, ratio)
        for numbers in result.cases
        for ratio in numbers.ratios
    }
