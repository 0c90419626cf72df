"""The harness of the benchmarks: turns, ratios, intervals, refused numbers, pages, and comparisons."""

import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import hardware, harness, pages, plan
from benchmarks.compare import IncomparableError, compare
from benchmarks.harness import Benchmark, Case, Numbers, Ratio, Result, TooWideError, interval_of_median, measure

WORDS = "Is it fast?\n\nMore words.\n"


def _contestant(name: str, values: list[float], calls: list[str]) -> Callable[[], float]:
    given = iter(values)

    def call() -> float:
        calls.append(name)
        return next(given)

    return call


def _benchmark(
    ours: list[float], theirs: list[float], *, attempts: int = 1, ended: list[str] | None = None
) -> Benchmark:
    def cases(quick: bool) -> Generator[Case]:
        contestants = {"ours": _contestant("ours", ours, []), "theirs": _contestant("theirs", theirs, [])}
        try:
            yield Case("load", "s", contestants, [("ours", "theirs")], len(ours) // attempts - 1, facts={"tokens": 7})
        finally:
            if ended is not None:
                ended.append("ended")

    return Benchmark("plan", WORDS, cases)


def test_contestants_take_turns_and_the_first_changes_by_round() -> None:
    calls: list[str] = []
    contestants = {name: _contestant(name, [1.0] * 4, calls) for name in "abc"}
    measure(Case("load", "s", contestants, [], rounds=3))
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"  # the first round is the warm-up


def test_the_median_of_the_turns_of_a_round_counts() -> None:
    calls: list[str] = []
    ours = [100.0, *(1.0, 50.0, 2.0), *(6.0, 4.0, 90.0)]  # a warm-up, and two rounds of three turns
    contestants = {"a": _contestant("a", ours, calls), "b": _contestant("b", [2.0] * 7, calls)}
    numbers = measure(Case("load", "s", contestants, [("a", "b")], rounds=2, turns=3))
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba" + "ab" + "ba" + "ab"
    assert (numbers.turns, numbers.measured["a"].median, numbers.ratios[0].interval) == (3, 4.0, (1.0, 3.0))
    result = msgspec.structs.replace(_result(), cases=[numbers])
    assert "Rounds: 2, of 3 turns each." in pages.markdown(result)


def test_the_warm_up_does_not_count_and_is_left_out_on_demand() -> None:
    values = [100.0, 1.0, 2.0, 3.0]
    warm = measure(Case("load", "s", {"a": _contestant("a", values, [])}, [], rounds=3))
    assert (warm.measured["a"].median, warm.measured["a"].quartiles) == (2.0, (1.5, 2.5))
    cold = measure(Case("load", "s", {"a": _contestant("a", values, [])}, [], rounds=4, warm_up=False))
    assert cold.measured["a"].median == 2.5


def test_a_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    contestants = {
        "ours": _contestant("ours", [1.0, 2.0, 9.0], []),
        "theirs": _contestant("theirs", [1.0, 4.0, 3.0], []),
    }
    (ratio,) = measure(Case("load", "s", contestants, [("ours", "theirs")], rounds=3, warm_up=False)).ratios
    assert (ratio.median, ratio.interval, ratio.coverage, ratio.spread) == (1.0, (0.5, 3.0), 0.75, 1.25)


def test_a_ratio_is_of_the_same_round_so_drift_cancels() -> None:
    drift = [2.0**number for number in range(8)]
    contestants = {
        "ours": _contestant("ours", [3 * value for value in drift], []),
        "theirs": _contestant("theirs", drift, []),
    }
    (ratio,) = measure(Case("load", "s", contestants, [("ours", "theirs")], rounds=7)).ratios
    assert (ratio.median, ratio.interval, ratio.spread) == (3.0, (3.0, 3.0), 0.0)


@pytest.mark.parametrize("num", range(2, 13))
def test_the_interval_of_a_median_has_its_coverage(num: int) -> None:
    """Each draw is below or above the true median with probability 1/2: count all of the ways."""
    low, high, coverage = interval_of_median([float(value) for value in range(num)])
    rank = int(low)  # of the lower end; the draws below the median are the smallest
    assert high == num - 1 - rank
    inside = sum(rank < sum(below) < num - rank for below in itertools.product((0, 1), repeat=num))
    assert coverage == pytest.approx(inside / 2**num)
    tighter = sum(rank + 1 < sum(below) < num - rank - 1 for below in itertools.product((0, 1), repeat=num))
    assert tighter / 2**num < harness.LEAST_COVERAGE <= coverage or rank == 0
    assert num < harness.LEAST_ROUNDS or coverage >= harness.LEAST_COVERAGE


_NOISY = [1.0, 1.0, 1.0, 2.0, 3.0, 3.0]


def test_a_wide_ratio_is_refused_and_named_after_the_clean_up() -> None:
    ended: list[str] = []
    noisy = _benchmark(_NOISY * 3, [1.0] * 18, attempts=harness.MOST_ATTEMPTS, ended=ended)
    with pytest.raises(TooWideError, match=r"load: ours / theirs: 100% of 2"):
        harness.measure_all(noisy, quick=False)
    assert ended == ["ended"]


def test_a_wide_case_is_measured_again_as_a_whole() -> None:
    steady = [9.0, 2.0, 2.1, 2.0, 1.9, 2.0]
    numbers = harness.measure_all(_benchmark(_NOISY + steady, [1.0] * 12, attempts=2), quick=False).case("load")
    assert (numbers.attempts, numbers.ratios[0].median, numbers.measured["ours"].median) == (2, 2.0, 2.0)


def test_a_quick_run_is_never_refused_and_says_so() -> None:
    result = harness.measure_all(_benchmark([1.0, 1.0, 3.0], [1.0] * 3), quick=True)
    assert result.quick
    assert result.ratio("load", "ours", "theirs") == 2.0
    assert "no number here is a result" in pages.markdown(result)


def test_too_few_rounds_are_no_result() -> None:
    with pytest.raises(AssertionError, match="load has 2 rounds"):
        harness.measure_all(_benchmark([1.0, 1.0, 1.0], [1.0] * 3), quick=False)


def test_a_contestant_that_fails_ends_the_case_with_its_clean_up() -> None:
    ended: list[str] = []
    with pytest.raises(StopIteration) as caught:
        harness.measure_all(_benchmark([1.0] * 6, [1.0] * 3, ended=ended), quick=False)
    assert caught.tb, "holds the frames, so nothing is cleaned up by chance"
    assert ended == ["ended"]


def test_a_refused_benchmark_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "BENCHMARK", _benchmark(_NOISY * 3, [1.0] * 18, attempts=harness.MOST_ATTEMPTS))
    assert command._run(["plan"], tmp_path / "out", quick=False) == 1
    assert capsys.readouterr().err.startswith("error: plan: the quartiles of a ratio are further apart than 20% ")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(plan, "BENCHMARK", _benchmark([1.0, 2.0, 2.1, 2.0, 1.9, 2.0], [1.0] * 6))
    assert command._run(["plan"], tmp_path / "out", quick=False) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["plan.json", "plan.md", "plan.svg"]
    result = harness.read(tmp_path / "out" / "plan.json")
    assert (result.benchmark, result.question, result.quick) == ("plan", "Is it fast?", False)
    assert result.case("load").facts == {"tokens": 7}
    assert result.date is not None and result.hardware == hardware.describe()


def _result(*ratios: Ratio, **changes: object) -> Result:
    numbers = Numbers("load", "s", bool(changes.pop("larger_is_better", False)), 9, {}, {}, list(ratios))
    hardware_of = changes.pop("hardware", {"processor": "P"})
    return Result("plan", "Is it fast?", False, "2026-01-02", "abc", 1.0, hardware_of, [numbers], **changes)  # type: ignore[arg-type]


def test_the_plot_has_a_point_for_each_ratio_in_the_order_of_the_values() -> None:
    ratios = [Ratio(f"<{value}>", "b", value, (value / 2, value * 2), 0.9, 0.1) for value in (0.01, 1.0, 30.0)]
    root = ElementTree.fromstring(pages.svg(_result(*ratios, Ratio("x", "b", 100.0))))
    name = "{http://www.w3.org/2000/svg}"
    places = [float(circle.attrib["cx"]) for circle in root.iter(f"{name}circle")]
    assert places == sorted(places) and len(places) == 4
    assert all(0 < place < float(root.attrib["width"]) for place in places)
    lines = [path.attrib["d"] for path in root.iter(f"{name}path")]
    assert len(lines) == 1 + 3  # the line at 1, and an interval for each ratio that has one
    assert lines[0].startswith(f"M{places[1]} ")
    assert [text.text for text in root.iter(f"{name}text")][1:3] == ["load: <0.01> / b", "0.01 [0.005, 0.02]"]


def _compared(tmp_path: Path, before: Result, after: Result) -> list[str]:
    for folder, result in (("a", before), ("b", after)):
        (tmp_path / folder).mkdir()
        harness.write(result, tmp_path / folder)
    return compare(tmp_path / "a", tmp_path / "b" / "plan.json", ["plan"])


@pytest.mark.parametrize(("larger_is_better", "word"), [(False, "worse"), (True, "better")])
def test_only_ratios_with_disjoint_intervals_changed(tmp_path: Path, larger_is_better: bool, word: str) -> None:
    lines = _compared(
        tmp_path,
        _result(Ratio("a", "b", 1.0, (0.9, 1.1)), Ratio("c", "b", 1.0, (0.9, 1.1)), larger_is_better=larger_is_better),
        _result(Ratio("a", "b", 1.2, (1.0, 1.3)), Ratio("c", "b", 1.2, (1.11, 1.3)), larger_is_better=larger_is_better),
    )
    assert lines == [
        "plan: 2026-01-02, abc -> 2026-01-02, abc",
        f"  load: c / b: 1 -> 1.2, {word}",
        "  1 ratios did not change beyond noise, 0 cannot tell: too few rounds, or another unit",
        "  0 measured numbers did not change beyond noise, 0 cannot tell: too few rounds, or another unit",
    ]


def _numbers(medians: list[float], *, rounds: int = 5, exact: bool = False, **facts: object) -> Numbers:
    """Return a contestant with these medians over rounds that differ by 1 %."""
    contestants = {
        name: _contestant(name, [median * (1 + number / 100) for number in range(rounds)], [])
        for name, median in zip("ab", medians, strict=True)
    }
    case = Case("load", "s", contestants, [("a", "b")], rounds, warm_up=False, exact=exact, facts=facts)
    return measure(case)


def _comparison(tmp_path: Path, before: Numbers, after: Numbers) -> list[str]:
    results = (msgspec.structs.replace(_result(), cases=[numbers]) for numbers in (before, after))
    return [line.strip() for line in _compared(tmp_path, *results)[1:] if " did not change " not in line]


def test_a_comparison_names_times_and_waits_that_changed_alike(tmp_path: Path) -> None:
    """Both contestants are ten times as slow: their ratio tells nothing."""
    before, after = (_numbers([x, 2 * x], half={"p99_ms": x * 50, "workers": 64}) for x in (1.0, 10.0))
    assert _comparison(tmp_path, before, after) == [
        "load: a: 1.02 -> 10.2 s, worse",
        "load: b: 2.04 -> 20.4 s, worse",
        "load: half p99_ms: 50 -> 500, a fact without an interval",
    ]


def test_numbers_of_two_rounds_change_only_if_they_are_exact(tmp_path: Path) -> None:
    before, after = ([1.0, 1.0], [3.0, 1.0])
    for name, exact in (("noisy", False), ("exact", True)):
        folder = tmp_path / name
        folder.mkdir()
        found = _comparison(folder, *(_numbers(medians, rounds=2, exact=exact) for medians in (before, after)))
        assert found == ["load: a / b: 1 -> 3, worse", "load: a: 1 -> 3.02 s, worse"] * exact


def test_numbers_in_another_unit_are_not_compared(tmp_path: Path) -> None:
    before = _numbers([1.0, 1.0])
    after = msgspec.structs.replace(_numbers([9.0, 9.0]), unit="ms")
    assert _comparison(tmp_path, before, after) == []


def test_a_quick_result_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(IncomparableError, match=r"b/plan.json: expected a result, got one of --quick"):
        _compared(tmp_path, _result(), msgspec.structs.replace(_result(), quick=True))


def test_a_comparison_names_another_machine_and_ratios_it_cannot_judge(tmp_path: Path) -> None:
    lines = _compared(
        tmp_path,
        _result(Ratio("a", "b", 1.0), Ratio("c", "b", 1.0), hardware={"processor": "P", "torch": "1"}),
        _result(Ratio("a", "b", 2.0, (1.9, 2.1)), hardware={"processor": "P", "torch": "2"}),
    )
    assert lines[1:] == [
        "  torch differs: 1 -> 2",
        "  0 ratios did not change beyond noise, 1 cannot tell: too few rounds, or another unit",
        "  in one of the two alone: load: c / b",
        "  0 measured numbers did not change beyond noise, 0 cannot tell: too few rounds, or another unit",
    ]


def test_files_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    with pytest.raises(IncomparableError, match="have none"):
        compare(tmp_path / "a", tmp_path / "b", ["plan"])
    (tmp_path / "plan.json").write_text('{"median_s": 1}')
    with pytest.raises(IncomparableError, match=r"plan.json: expected a result of the harness: .*missing"):
        compare(tmp_path, tmp_path, ["plan"])


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_commit_is_marked_if_files_other_than_results_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_REPO", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert hardware.commit() is None

    def git(*arguments: str) -> str:
        options = ("-c", "user.name=t", "-c", "user.email=t@t")
        ended = subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return ended.stdout.strip()

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for path in (tmp_path / "code.py", results / "plan.json"):
        path.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "First")
    head = git("rev-parse", "HEAD")[:12]
    assert hardware.commit() == head
    (results / "plan.json").write_text("2")
    assert hardware.commit() == head
    (tmp_path / "code.py").write_text("2")
    assert hardware.commit() == f"{head}-changed"


def test_results_of_other_programs_have_date_commit_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    hardware.write(str(path), {"cases": [1]})
    written = json.loads(path.read_text())
    assert list(written) == ["date", "commit", "hardware", "cases"]
    assert written["date"] <= hardware.now() and written["commit"] == hardware.commit()
    assert written["hardware"] == hardware.describe() and written["cases"] == [1]


def test_numbers_are_rounded_to_five_digits() -> None:
    contestants = {"a": _contestant("a", [math.pi * 1e4] * 3, []), "b": _contestant("b", [1.0] * 3, [])}
    numbers = measure(Case("load", "s", contestants, [("a", "b")], rounds=2))
    assert numbers.measured["a"].median == numbers.ratios[0].median == 31416.0
