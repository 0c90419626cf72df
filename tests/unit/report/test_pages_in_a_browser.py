"""The pages of a run in a real browser: drawn whole on a desktop and on a phone, without an error or a request."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from areal_rloo.config import dump_config, load_config
from areal_rloo.report import write_report
from areal_rloo.report.comparison import write_comparison
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryFile, TrajectoryRecord

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
OF_THE_BROWSER = re.compile(r"https?://[^/]*\.(google|googleapis|gvt1|gvt2)\.com/")
# Tells the browser's own view of the page in its title.
MEASURE = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"

pytestmark = [pytest.mark.full, pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")]


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


def _opened(page: Path, width: int) -> tuple[str, str, str]:
    """Open a page; return the page as the browser has it, the console, and the log of requests."""
    log = page.with_suffix(".requests.json")
    command = [
        *(
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            *QUIET,
            f"--user-data-dir={page.parent / 'user'}",
        ),
        *(f"--window-size={width},1000", "--enable-logging=stderr", f"--log-net-log={log}", "--dump-dom"),
        page.as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr, log.read_text()


@pytest.mark.parametrize("name", ["report", "trajectories", "comparison"])
def test_a_page_has_no_error_and_asks_for_nothing(name: str, pages: dict[str, Path]) -> None:
    shown, console, requests = _opened(pages[name], 1360)
    assert "</body>" in shown
    assert "CONSOLE" not in console
    asked = re.findall(r'"url":"(https?://[^"]+)"', requests)
    assert [url for url in asked if not OF_THE_BROWSER.match(url)] == []


@pytest.mark.parametrize("width", [1360, 500])  # no headless window is narrower
@pytest.mark.parametrize("name", ["report", "trajectories", "comparison"])
def test_a_page_fits_into_its_window(name: str, width: int, pages: dict[str, Path], tmp_path: Path) -> None:
    measured = tmp_path / "measured.html"
    text = re.sub("<meta http-equiv=.?Content-Security-Policy[^>]*>", "", pages[name].read_text())
    measured.write_text(text + MEASURE)
    wide = re.search(r"<title>(\d+) of (\d+)</title>", _opened(measured, width)[0])
    assert wide is not None
    assert int(wide[1]) <= int(wide[2]) <= width
