"""Whole runs whose learner and engine compute in turns on the same cores: bounds, deaths, stops, and nothing left."""

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
from support.local_runs import Run, balanced

from areal_rloo.files import memory_folder

pytestmark = pytest.mark.slow


def _folder_of_turns(run: Run) -> Path:
    return memory_folder() / f"areal_rloo-turns-{hashlib.sha256(os.fsencode(run.folder)).hexdigest()[:16]}"


@pytest.mark.parametrize(("eta", "num_ranks"), [pytest.param(0, 1, marks=pytest.mark.rare), (2, 2)])
def test_turns_keep_the_staleness_bound_and_survive_deaths(eta: int, num_ranks: int, tmp_path: Path) -> None:
    options = (f"algorithm.max_staleness={eta}", f"learner.num_ranks={num_ranks}", "learner.num_train_steps=24")
    restarts = ("launcher.max_learner_restarts=1", "wire.heartbeat_timeout_s=3")
    run = Run(tmp_path / "run", "rollout.share_devices=in_turns", *options, *restarts)
    run.wait_for(lambda: len(run.records()) >= 2)
    assert _folder_of_turns(run).is_dir()
    run.children("areal_rloo.rollout")[0].kill()
    run.wait_for_checkpoint(4)
    run.rank(0).kill()
    run.wait_for_checkpoint(8)
    for stopped in (run.children("areal_rloo.rollout")[0], run.rank(0)):
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(1)
        stopped.send_signal(signal.SIGCONT)
    code, output = run.wait()
    assert code == 0, output
    assert [record.num_train_steps for record in run.records()] == list(range(1, 25))
    assert max(record.staleness_max for record in run.records()) <= eta
    summary = run.summary()
    assert balanced(summary["ledger"])
    assert summary["ledger"]["dropped"].keys() <= {"stale"}
    logs = "".join(path.read_text() for path in (run.folder / "logs").glob("*.log"))
    assert "has not given the device" not in logs
    assert not _folder_of_turns(run).exists()
