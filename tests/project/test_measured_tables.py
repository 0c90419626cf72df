"""Compare the tables of docs/measured.md with the result files of the benchmarks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks" / "results"
DOCUMENT = (REPO / "docs" / "measured.md").read_text(encoding="utf-8")


def _table(title: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without the header."""
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert section, title
    rows = [line for line in section.group(1).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("title", "file"),
    [("The cost of staleness", "staleness.json"), ("The cost of mixed staleness", "staleness_mixed.json")],
)
def test_the_staleness_tables_equal_the_result_files(title: str, file: str) -> None:
    measured = {(row["correction"], row["eta"]): row for row in _result(file)["table"]}
    cells = _table(title)
    assert [int(row[0]) for row in cells] == [0, 1, 2, 4, 8, 16]
    for eta, *of_corrections in cells:
        for name, cell in zip(("decoupled", "naive_ppo", "no_correction"), of_corrections, strict=True):
            row = measured[name, int(eta)]
            final = f"{row['final_mean']:.3f} ± {row['final_std']:.3f}"
            assert cell == f"{final} / {row['area_mean']:.3f} ± {row['area_std']:.3f}"


def test_the_table_of_the_wire_equals_the_result_file() -> None:
    sizes = [size for name, size in _result("wire.json").items() if name != "hardware"]
    measured = [
        [f"{size['trajectory_bytes']:,}", *(f"{rate:,}" for rate in size["trajectories_per_s"].values())]
        for size in sizes
    ]
    assert _table("Messages over the wire") == measured


def test_the_table_of_algorithms_equals_the_result_file() -> None:
    measured = [
        [
            row["algorithm"],
            f"{row['final_mean']:.3f} ± {row['final_interval']:.3f}",
            f"{row['area_mean']:.3f} ± {row['area_interval']:.3f}",
        ]
        for row in _result("algorithms.json")["table"]
    ]
    assert _table("The algorithms against each other") == measured


def _largest(processes: dict[str, Any], begin: str) -> str:
    rows = [row for name, row in processes.items() if name.startswith(begin)]
    return " / ".join(f"{max(row[key] for row in rows):.1f}" for key in ("middle_third_mib", "last_third_mib"))


def test_the_table_of_memory_equals_the_result_file_and_is_flat() -> None:
    kinds = ("learner", "rollout", "rewards", "launcher", "/dev/shm")
    for cells, (name, case) in zip(
        _table("Healthy, and with either half slow"), _result("memory.json")["cases"].items(), strict=True
    ):
        times = " / ".join(f"{case[key]:.3f}" for key in ("learner_busy_s", "rollout_busy_s", "step_s"))
        assert cells == [
            *(name, f"{case['trained_samples']:,}", times),
            *(_largest(case["processes"], kind) for kind in kinds),
        ]
        assert all(row["flat"] for row in case["processes"].values())


def test_the_table_of_fuzzing_equals_the_result_file_without_findings() -> None:
    targets = _result("fuzz.json")["targets"]
    columns = ("seconds", "cpu_seconds", "inputs", "branches", "peak_rss_mib")
    assert _table("The longest search of each boundary") == [
        [name, *(f"{row[key]:,}" for key in columns)] for name, row in targets.items()
    ]
    assert not any(row["findings"] for row in targets.values())
