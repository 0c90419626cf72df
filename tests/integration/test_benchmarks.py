"""Every benchmark of the harness runs with `--quick`, and writes numbers, a page and a plot. No time is asserted."""

import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import harness
from benchmarks.__main__ import NAMES

REPO = Path(__file__).resolve().parents[2]
WHOLE_RUNS = ("async_vs_sync", "observing")  # minutes


def _benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rare) if name in WHOLE_RUNS else name for name in NAMES]
)
def test_a_quick_benchmark_writes_numbers_a_page_and_a_plot(tmp_path: Path, name: str) -> None:
    ended = _benchmarks(name, "--quick", "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.md", f"{name}.svg"]
    result = harness.read(tmp_path / f"{name}.json")
    assert (result.benchmark, result.quick) == (name, True)
    assert result.question.endswith("?")
    assert result.date and result.hardware["num_cores"]
    page = (tmp_path / f"{name}.md").read_text()
    for numbers in result.cases:
        assert numbers.ratios
        for contestant, measured in numbers.measured.items():
            assert 0 < measured.median < math.inf
            assert f"| {contestant} | {measured.median:g} |" in page
        for ratio in numbers.ratios:
            assert {ratio.of, ratio.to} <= set(numbers.measured)
            assert ratio.interval is not None and ratio.interval[0] <= ratio.median <= ratio.interval[1]
    num_ratios = sum(len(numbers.ratios) for numbers in result.cases)
    circles = ElementTree.parse(tmp_path / f"{name}.svg").iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == num_ratios


def test_several_benchmarks_run_in_a_process_each(tmp_path: Path) -> None:
    ended = _benchmarks("intake", "wire", "--quick", "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert {path.stem for path in tmp_path.iterdir()} == {"intake", "wire"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--quick"), "--quick: expected --output FOLDER, because these are no results"),
        (("plans",), "plans: expected names among plan, generation, "),
        (("--compare", "nowhere", "pyproject.toml"), "--compare: pyproject.toml: expected a result of the harness"),
    ],
)
def test_a_wrong_command_is_told_in_a_line(arguments: tuple[str, ...], words: str) -> None:
    ended = _benchmarks(*arguments)
    assert ended.returncode == 2
    assert words in ended.stderr.splitlines()[-1]


def test_a_result_compared_with_itself_has_no_change() -> None:
    folder = str(REPO / "benchmarks" / "results")
    said = _benchmarks("--compare", folder, folder).stdout
    assert " -> " in said and "better" not in said and "worse" not in said


def test_the_list_has_a_line_for_each_benchmark_and_program() -> None:
    said = _benchmarks("--list").stdout
    own, _, others = said.partition("Programs of their own")
    assert [line.split()[0] for line in own.splitlines()[1:]] == list(NAMES)
    assert all(line.endswith("?") for line in own.splitlines()[1:])
    assert "  staleness " in others and "  __main__ " not in others
    assert not set(NAMES) & {line.split()[0] for line in others.splitlines()[1:]}
