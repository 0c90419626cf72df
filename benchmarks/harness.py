"""Measure contestants against named alternatives: interleaved, with the spread of each ratio, refused if too wide.

A benchmark is a module with a `BENCHMARK`. The first line of its docstring is the question. `cases` is a generator: a
case is set up before its `yield`, measured during the `yield`, and cleaned up after. In each round, every contestant of
the case does the work once, or in several turns, of which the median counts. The first contestant changes with the
turn, so no contestant is always behind the same other. A ratio is taken within a round, because the speed of a shared
machine changes over the minutes. A case with too wide a ratio is measured again, as a whole; the result names the
number of attempts. The narrowest attempt counts, so its interval contains the median less often than stated.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import hardware

WIDEST_SPREAD = 0.2  # of a ratio: the distance of its quartiles, over its median
LEAST_COVERAGE = 0.9
MOST_ATTEMPTS = 3  # at a case whose ratio is too wide
LEAST_ROUNDS = 5  # of numbers to report: with fewer, no interval has this coverage


@dataclass(frozen=True)
class Case:
    """Contestants that do the same work. Each call measures once, and returns a number of the unit."""

    name: str
    unit: str
    contestants: Mapping[str, Callable[[], float]]
    ratios: Sequence[tuple[str, str]]  # a contestant, and its named alternative
    rounds: int  # at least 2
    turns: int = 1  # of each contestant in a round: where a single turn depends on the machine's luck
    larger_is_better: bool = False
    warm_up: bool = True  # a round before that does not count
    exact: bool = False  # the numbers hardly change, so two rounds are enough to report them
    facts: dict[str, Any] = field(default_factory=dict)  # about the work; a contestant may add some


@dataclass(frozen=True)
class Benchmark:
    """A question, and the cases that answer the question; `quick` cases take seconds and answer nothing."""

    name: str
    docstring: str
    cases: Callable[[bool], Generator[Case]]

    @property
    def question(self) -> str:
        return self.docstring.partition("\n")[0]


class Measured(msgspec.Struct, frozen=True):
    """The values of a contestant over the rounds."""

    median: float
    quartiles: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None  # of the median
    coverage: float | None = None  # of the interval


class Ratio(msgspec.Struct, frozen=True):
    """A contestant over its alternative, by round."""

    of: str
    to: str
    median: float
    interval: tuple[float, float] | None = None  # of the median
    coverage: float | None = None  # of the interval
    spread: float | None = None  # distance of the quartiles, over the median


class Numbers(msgspec.Struct, frozen=True):
    """The results of a case."""

    case: str
    unit: str
    larger_is_better: bool
    rounds: int | None
    facts: dict[str, Any]
    measured: dict[str, Measured]
    ratios: list[Ratio]
    attempts: int = 1  # those before had a wide ratio
    turns: int = 1  # of each contestant in a round
    exact: bool = False  # the numbers hardly change, so two rounds are enough


class Result(msgspec.Struct, frozen=True):
    """A result file. None: unknown."""

    benchmark: str
    question: str
    quick: bool
    date: str | None
    commit: str | None
    seconds: float | None
    hardware: dict[str, str | int]
    cases: list[Numbers]

    def case(self, name: str) -> Numbers:
        """Return the numbers of a case."""
        return next(numbers for numbers in self.cases if numbers.case == name)

    def ratio(self, case: str, of: str, to: str) -> float:
        """Return the median of a ratio."""
        return next(ratio.median for ratio in self.case(case).ratios if (ratio.of, ratio.to) == (of, to))


class TooWideError(Exception):
    """A ratio spreads too much to be reported."""


def measure_all(benchmark: Benchmark, *, quick: bool) -> Result:
    """Measure all cases.

    Raises:
        TooWideError: the quartiles of a ratio are too far apart, and the benchmark is not a quick one.
    """
    started, date, commit = time.monotonic(), hardware.now(), hardware.commit()
    results = []
    with closing(benchmark.cases(quick)) as cases:
        for case in cases:
            assert quick or case.exact or case.rounds >= LEAST_ROUNDS, f"{case.name} has {case.rounds} rounds"
            results.append(measure(case) if quick else _steady(case))
    if not quick:
        _refuse_wide(results)
    seconds = round(time.monotonic() - started, 1)
    return Result(benchmark.name, benchmark.question, quick, date, commit, seconds, hardware.describe(), results)


def _steady(case: Case) -> Numbers:
    """Measure a case, and again while a ratio is wide: other programs on the machine come and go."""
    for attempt in range(1, MOST_ATTEMPTS + 1):
        numbers = msgspec.structs.replace(measure(case), attempts=attempt)
        if not _wide([numbers]):
            break
    return numbers


def measure(case: Case) -> Numbers:
    """Let the contestants take turns, and return the medians and spreads over the rounds."""
    values: dict[str, list[float]] = {name: [] for name in case.contestants}
    names = list(values)
    num_turns = 0
    for number in range(case.rounds + case.warm_up):
        of_round: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(case.turns if number >= case.warm_up else 1):
            first = num_turns % len(names)
            num_turns += 1
            for name in names[first:] + names[:first]:
                of_round[name].append(case.contestants[name]())
        if number >= case.warm_up:
            for name, of_turns in of_round.items():
                values[name].append(statistics.median(of_turns))
    measured = {
        name: Measured(_short(statistics.median(of)), _quartiles(of), *_interval(of)) for name, of in values.items()
    }
    ratios = [_ratio(of, to, values[of], values[to]) for of, to in case.ratios]
    return Numbers(
        *(case.name, case.unit, case.larger_is_better, case.rounds, case.facts, measured, ratios),
        turns=case.turns,
        exact=case.exact,
    )


def write(result: Result, folder: Path) -> None:
    """Write the result as NAME.json."""
    text = json.dumps(msgspec.to_builtins(result), indent=2) + "\n"
    (folder / f"{result.benchmark}.json").write_text(text, encoding="utf-8")


def read(path: Path) -> Result:
    """Read a result file.

    Raises:
        msgspec.DecodeError: the file is no result of this harness.
    """
    return msgspec.json.decode(path.read_bytes(), type=Result)


def forking_from(module: str) -> ForkServerContext:
    """Return a context for processes that begin with this module imported, and with its memory.

    A server without threads forks them; it is the server of the first call in this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of the work."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the narrowest pair of order statistics around the median with `LEAST_COVERAGE`, and the coverage.

    For n draws of any continuous distribution, the k-th smallest and the k-th largest contain the median with
    probability 1 - 2 P(B < k), B binomial with n and 1/2. Too few draws: the smallest and the largest.
    """
    ordered, num = sorted(values), len(values)
    best = (ordered[0], ordered[-1], 1 - 2 * 0.5**num)
    for k in range(2, num // 2 + 1):
        coverage = 1 - 2 * sum(math.comb(num, below) for below in range(k)) / 2**num
        if coverage >= LEAST_COVERAGE:
            best = (ordered[k - 1], ordered[-k], coverage)
    return best


def _ratio(of: str, to: str, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
    first, third = _quartiles(by_round)
    median = statistics.median(by_round)
    spread = _short((third - first) / median)
    return Ratio(of, to, _short(median), *_interval(by_round), spread)


def _interval(values: Sequence[float]) -> tuple[tuple[float, float], float]:
    low, high, coverage = interval_of_median(values)
    return (_short(low), _short(high)), round(coverage, 3)


def _wide(results: Sequence[Numbers]) -> list[str]:
    """Describe each ratio with too wide a spread."""
    return [
        f"{numbers.case}: {ratio.of} / {ratio.to}: {ratio.spread:.0%} of {ratio.median:.3g}"
        for numbers in results
        for ratio in numbers.ratios
        if ratio.spread is not None and ratio.spread > WIDEST_SPREAD
    ]


def _refuse_wide(results: Sequence[Numbers]) -> None:
    if wide := _wide(results):
        raise TooWideError(
            f"the quartiles of a ratio are further apart than {WIDEST_SPREAD:.0%} of its median ({'; '.join(wide)}); "
            "nothing is written, run again on a quiet machine"
        )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return _short(first), _short(third)


def _short(value: float) -> float:
    """Round to five digits."""
    return float(f"{value:.5g}")
