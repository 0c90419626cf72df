"""The shipped alarms fire for a real run in trouble, and are silent after it; the minutes of the rules are seconds.

`tests/project/test_alert_rules.py` has every alarm with its own times, by the unit tests of promtool. The other files
`test_provoked_*.py` provoke the other alarms.
"""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run
from support.patience import eventually
from support.prometheus import Prometheus, assert_a_silent_end, prometheus, sooner

pytestmark = [
    *(pytest.mark.slow, pytest.mark.rare),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed here"),
]


NAME = "--worker-id=rollout-0"


def process_of_worker(server: Prometheus) -> object:
    """Tell a process of the first worker by when it began; None before its first scrape."""
    found = server.query('process_start_time_seconds{process="rollout-0"} and on (instance) up == 1')
    return found[0]["value"][1] if found else None


def test_each_trouble_of_a_run_fires_its_alarm_and_the_end_silences_all(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    targets = tmp_path / "targets"
    run = start(  # a model without a warm start gets no reward
        *("learner.num_train_steps=100000", "rollout.num_workers=2", "launcher.max_restarts=20"),
        *("wire.heartbeat_timeout_s=3", "evaluation.every_n_versions=0", "data.eval=null"),
    )
    run.wait_for(lambda: len(run.records()) >= 3)
    with prometheus(tmp_path, targets, rules=sooner) as server:
        eventually(lambda: {"Unhealthy", "EqualRewards"} <= server.alarms(), "a reward of 0")
        for _ in range(3):
            started = process_of_worker(server)
            next(worker for worker in run.children("areal_rloo.rollout") if NAME in worker.cmdline()).kill()
            eventually(lambda: process_of_worker(server) not in (None, started), "the next process")  # noqa: B023
        eventually(lambda: "RestartLoop" in server.alarms(), "a worker that dies again and again")
        first, second = run.children("areal_rloo.rollout")
        first.send_signal(signal.SIGSTOP)
        eventually(lambda: {"TargetDown", "WorkerMissing"} <= server.alarms(), "a worker that stands still")
        assert "NoRolloutWorker" not in server.alarms()
        second.send_signal(signal.SIGSTOP)
        eventually(lambda: {"NoRolloutWorker", "NoTrainStep"} <= server.alarms(), "no worker at all")
        for worker in (first, second):
            worker.send_signal(signal.SIGCONT)
        trouble = {"TargetDown", "WorkerMissing", "NoRolloutWorker", "NoTrainStep"}
        eventually(lambda: not trouble & server.alarms(), "the run goes on")
        assert_a_silent_end(server, run)


def test_a_healthy_quickstart_has_no_alarm(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("rollout.num_workers=2", "learner.num_train_steps=30", small=())
    for folder in ("shipped", "sooner"):
        (tmp_path / folder).mkdir()
    with (
        prometheus(tmp_path / "shipped", tmp_path / "targets") as shipped,
        prometheus(tmp_path / "sooner", tmp_path / "targets", rules=sooner) as shortened,
    ):
        code, output = run.wait()
        assert code == 0, output
        assert len(run.records()) == 30
        assert shipped.query("max_over_time(areal_rloo_num_train_steps_total[1d]) > 20"), "it was watched"
        assert shipped.alarms_so_far() == set()
        # Within a train step, a worker can idle for seconds; and a process ends seconds before Prometheus forgets it.
        assert shortened.alarms_so_far() <= {"RolloutIdle", "TargetDown"}
