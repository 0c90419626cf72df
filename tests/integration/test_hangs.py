"""A process that hangs in a run is found and started again; SIGUSR2 shows where a process stands."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run
from support.patience import eventually

pytestmark = pytest.mark.slow

HANGS_ONCE = """
import time
from pathlib import Path

from areal_rloo.{module} import {name}

original = {name}.{method}
calls = 0


{kind} hangs(self, *arguments, **options):
    global calls
    calls += 1
    mark = Path(__file__).with_name("hung")
    if calls == 10 and not mark.exists():
        mark.touch()
        time.sleep(10_000)
    return {result}original(self, *arguments, **options)


{name}.{method} = hangs
"""
WORKER = {"module": "rollout.episode", "name": "SingleTurn", "method": "run", "kind": "async def", "result": "await "}
LEARNER = {"module": "intake.intake", "name": "Intake", "method": "tick", "kind": "def", "result": ""}
ENGINE = {"module": "engines.embedded.scheduler", "name": "Scheduler", "method": "step", "kind": "def", "result": ""}


@pytest.mark.parametrize(
    ("where", "log", "work"),
    [
        pytest.param(WORKER, "rollout-0", "the event loop", marks=pytest.mark.rare),
        (LEARNER, "learner", "the event loop of the intake"),
        (ENGINE, "rollout-0", "the engine, which has requests,"),
    ],
    ids=["loop of a worker", "loop of the learner", "engine"],
)
def test_a_process_that_hangs_is_started_again(
    start: Callable[..., Run], tmp_path: Path, where: dict[str, str], log: str, work: str
) -> None:
    entry = tmp_path / "hangs_once.py"
    entry.write_text(HANGS_ONCE.format(**where))
    run = start(
        f"run.entry={entry}",
        "launcher.hang_timeout_s=10",
        "launcher.max_learner_restarts=2",
        "learner.num_train_steps=20",
        "rollout.num_workers=1",
    )
    code, output = run.wait()
    assert code == 0, output
    assert (tmp_path / "hung").exists(), "nothing hung"
    text = (run.folder / "logs" / f"{log}.log").read_text()
    assert f"watchdog: {work} has not moved for" in text and "in hangs" in text
    assert len(run.records()) == 20


def test_a_signal_shows_the_stacks_of_every_process(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=100000")
    run.wait_for(lambda: len(run.records()) >= 1)
    for module, log in (("areal_rloo.learner", "learner"), ("areal_rloo.rollout", "rollout-0")):
        path = run.folder / "logs" / f"{log}.log"
        os.kill(run.children(module)[0].pid, signal.SIGUSR2)
        eventually(lambda path=path: "stacks on a signal" in path.read_text(), f"no stacks in {log}.log")  # type: ignore[misc]
        task = "task the broadcaster" if log == "learner" else "task messages to the learner"
        eventually(lambda path=path, task=task: task in path.read_text(), f"no {task} in {log}.log")  # type: ignore[misc]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 0
