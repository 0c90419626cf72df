"""A sweep of real runs: two at a time, one report; a stop drains the runs, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.local_runs import REPO, SMALL, with_last_values

from areal_rloo.launcher.run_folder import is_finished, newest_checkpoint

pytestmark = pytest.mark.slow


def _start(folder: Path, *options: str) -> subprocess.Popen[str]:
    targets = f"telemetry.targets_folder={folder.parent / 'targets'}"
    over = ("--config", "quickstart.yaml", "--over", "run.seed=0,1", "--folder", str(folder), "--parallel", "2")
    command = [sys.executable, "-m", "areal_rloo", "sweep", *over, *with_last_values(*SMALL, targets, *options)]
    environment = {**os.environ, "AREAL_RLOO_CACHE": str(REPO / ".pytest_cache" / "models")}
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_stopped_sweep_drains_and_the_same_command_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    names = ["1-seed=0", "2-seed=1"]
    stopped = _start(folder, "learner.num_train_steps=100000")
    ends_s = time.monotonic() + 300
    while not all(newest_checkpoint(folder / name) for name in names):
        assert stopped.poll() is None and time.monotonic() < ends_s, "both runs reach a checkpoint"
        time.sleep(0.2)
    stopped.send_signal(signal.SIGINT)
    output, _ = stopped.communicate(timeout=240)
    assert stopped.returncode == 130, output
    assert not any(is_finished(folder / name) for name in names)
    steps = max(int((newest_checkpoint(folder / name) or "").removeprefix("step-")) for name in names) + 2
    for words in ("resumes", "finished before"):
        again = _start(folder, f"learner.num_train_steps={steps}")
        output, _ = again.communicate(timeout=480)
        assert again.returncode == 0, output
        assert all(f"{name}: {words}" in output for name in names)
        assert "2 of 2 runs ended with exit code 0" in output
        assert output.splitlines()[-1] == str(folder / "comparison.html")
    assert "<h1>2 runs, 1 setting</h1>" in (folder / "comparison.html").read_text()
    assert all(is_finished(folder / name) for name in names)
