"""The pages of a run in a real browser: drawn whole on a desktop and on a phone, without an error or a request."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.browser import needs_browser, opened, widths

from areal_rloo.config import dump_config, load_config
from areal_rloo.report import write_report
from areal_rloo.report.comparison import write_comparison
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryFile, TrajectoryRecord

pytestmark = [pytest.mark.full, needs_browser]


@pytest.fixture
def pages(
    tmp_path: Path,
    make_train_record: Callable[..., TrainRecord],
    eval_record: EvalRecord,
    make_trajectory: Callable[..., TrajectoryRecord],
) -> dict[str, Path]:
    """Write the pages of two runs."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump_config(load_config("quickstart.yaml", [f"run.seed={seed}"])))
        metrics, samples = MetricsFile(folder / "metrics.jsonl"), TrajectoryFile(folder / FILE_NAME)
        for step in range(1, 61):
            numbers = {"reward_mean": step / 60, "entropy": 900.0 if step == 30 else 1 + seed / step}
            metrics.append(make_train_record(num_train_steps=step, policy_version=step, **numbers))
            samples.append(make_trajectory(policy_version=step, sample_index=index) for index in range(4))
        for version in (0, 30, 60):
            metrics.append(
                msgspec.structs.replace(
                    eval_record, policy_version=version, accuracy=0.4 + version / 120, reward=0.4 + version / 120
                )
            )
        metrics.close()
        samples.close()
        folders.append(folder)
    report = write_report(folders[0])
    return {
        "report": report,
        "trajectories": report.with_name("trajectories.html"),
        "comparison": write_comparison(folders, tmp_path / "comparison.html"),
    }


@pytest.mark.parametrize("name", ["report", "trajectories", "comparison"])
def test_a_page_has_no_error_and_asks_for_nothing(name: str, pages: dict[str, Path]) -> None:
    shown = opened(pages[name], 1360)
    assert "</body>" in shown.dom
    assert shown.console == shown.asked == []


@pytest.mark.parametrize("width", [1360, 500])  # no headless window is narrower
@pytest.mark.parametrize("name", ["report", "trajectories", "comparison"])
def test_a_page_fits_into_its_window(name: str, width: int, pages: dict[str, Path]) -> None:
    content, window = widths(pages[name], width)
    assert content <= window <= width
