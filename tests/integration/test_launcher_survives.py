"""A local launcher when workers, the learner or the launcher itself end at a bad moment."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.local_runs import Run, assert_drained, balanced
from support.patience import eventually

from areal_rloo.learner.lock import lock_path

pytestmark = pytest.mark.slow
ENDLESS = "learner.num_train_steps=10000"


def test_a_drain_after_a_crash_of_the_learner_names_the_checkpoint(start: Callable[..., Run]) -> None:
    """The signal comes before the launcher has seen the crash, so nothing is restarted."""
    run = start(ENDLESS, "launcher.max_learner_restarts=1")
    run.wait_for_checkpoint(2)
    (learner,) = run.children("areal_rloo.learner")
    run.process.send_signal(signal.SIGSTOP)
    learner.kill()
    run.wait_for(lambda: learner.status() == psutil.STATUS_ZOMBIE)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGCONT)
    code, output = run.wait()
    assert code == 137, output
    assert f"go on from the newest checkpoint (step-{run.saved_steps():06d}) with areal-rloo resume " in output
    summary = run.summary()
    assert (summary["exit_reason"], summary["num_train_steps"]) == ("killed", len(run.records()))
    assert balanced(summary["ledger"])
    assert "report.html\ntrajectories: " in output


def test_a_run_stopped_in_the_warm_start_starts_again_by_the_same_command(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=1")
    run.wait_for(lambda: bool(run.children("areal_rloo.learner.warm_start")))
    run.children("areal_rloo.learner.warm_start")[0].suspend()
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 0, output
    assert output.strip().endswith("stopped during the warm start; nothing was trained yet")
    again = start("learner.num_train_steps=1")
    code, output = again.wait()
    assert code == 0, output
    assert again.summary()["exit_reason"] == "completed"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_whose_warm_start_is_killed_goes_on(start: Callable[..., Run], number: signal.Signals) -> None:
    run = start("learner.num_train_steps=1", "launcher.max_learner_restarts=1")
    run.wait_for(lambda: bool(run.children("areal_rloo.learner.warm_start")))
    run.children("areal_rloo.learner.warm_start")[0].send_signal(number)
    code, output = run.wait()
    assert code == 0, output
    assert f"the warm start ended with code {128 + number} ({number.name}); restart 1 of 1 in 0.0 s" in output
    assert run.summary()["exit_reason"] == "completed"


def test_a_run_stopped_before_the_learner_is_ready_says_so(start: Callable[..., Run], tmp_path: Path) -> None:
    entry, waits = tmp_path / "waits.py", tmp_path / "waits"
    entry.write_text(
        "import pathlib, sys, time\n"
        "if '--rank=0' in sys.argv:\n"
        f"    pathlib.Path({str(waits)!r}).touch()\n"
        "    time.sleep(600)\n"
    )
    run = start(ENDLESS, entry=entry)
    run.wait_for(waits.exists)
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 0, output
    assert "draining: a checkpoint if the training has begun" in output
    assert "nothing was trained, and there is nothing to resume" in output
    assert run.summary()["exit_reason"] == "nothing_trained"
    assert "ended: nothing_trained" in (run.folder / "report.html").read_text()


def test_a_start_that_failed_before_any_token_is_repeated(start: Callable[..., Run], tmp_path: Path) -> None:
    """The worker fails when the learner is ready."""
    entry, begun = tmp_path / "refuses.py", tmp_path / "run" / "configs" / "step-000000.yaml"
    entry.write_text(
        "import pathlib, sys, time\n"
        "if 'areal_rloo.rollout' in sys.orig_argv:\n"
        f"    while not pathlib.Path({str(begun)!r}).exists():\n"
        "        time.sleep(0.05)\n"
        "    sys.exit('no such option')\n"
    )
    run = start("learner.num_train_steps=1", entry=entry)
    code, output = run.wait()
    assert code == 2, output
    assert "no such option" in output
    assert f"logs: {run.folder / 'logs'}\n" in output
    code, output = start("learner.num_train_steps=1").wait()
    assert code == 0, output
    assert run.summary()["exit_reason"] == "completed"
    assert run.saved_steps() == 1


def test_a_users_mistake_after_a_good_start_is_a_crash_of_the_worker(start: Callable[..., Run], tmp_path: Path) -> None:
    """The reward's file is away for a while; and a line of metrics.jsonl is damaged."""
    reward, away = tmp_path / "mine.py", tmp_path / "away.py"
    reward.write_text("def score(completion): return float(len(completion) % 2)\n")
    run = start(f"data.train.rewards=[{{function: '{reward}:score'}}]", ENDLESS)
    run.wait_for(lambda: len(run.records()) >= 2)
    log = run.folder / "logs" / "launcher.log"

    def is_noticed() -> bool:  # the next record of the learner replaces the damaged line
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"type": "train", "num_train_steps": "many"}\n')
        return "the launcher cannot look at the run" in log.read_text()

    run.wait_for(is_noticed)
    reward.rename(away)
    (worker,) = run.children("areal_rloo.rollout")
    worker.kill()
    run.wait_for(lambda: "rollout-0 ended with code 2; restart in" in log.read_text())
    away.rename(reward)
    (run.folder / "metrics.jsonl").write_text("")
    run.wait_for(lambda: len(run.records()) >= 2)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    assert "rollout-0 ended with code 137 (SIGKILL); restart in" in log.read_text()
    assert_drained(run)


def test_a_run_without_workers_names_the_cause_and_the_way_on(start: Callable[..., Run], tmp_path: Path) -> None:
    entry, saved = tmp_path / "dies.py", tmp_path / "run" / "checkpoints" / "step-000001"
    entry.write_text(
        "import os, pathlib, sys, threading, time\n"
        "def die():\n"
        f"    while not pathlib.Path({str(saved)!r}).exists():\n"
        "        time.sleep(0.02)\n"
        "    print('MemoryError: the engine has no memory', flush=True)\n"
        "    os._exit(1)\n"
        "if 'areal_rloo.rollout' in sys.orig_argv:\n"
        "    threading.Thread(target=die, daemon=True).start()\n"
    )
    run = start(ENDLESS, "launcher.max_restarts=0", "checkpoint.keep=1000", entry=entry)
    code, output = run.wait()
    assert code == 1, output
    logs = run.folder / "logs"
    cause = f"({logs / 'rollout-0'}.out and .log say more). MemoryError: the engine has no memory\n"
    assert f"rollout-0 ended with code 1; no restart is left (launcher.max_restarts) {cause}" in output
    resume = f"areal-rloo resume {run.folder}; docs/troubleshooting.md has causes and remedies\n"
    newest = f"step-{run.saved_steps():06d}"
    assert f"logs: {logs}; go on from the newest checkpoint ({newest}) with {resume}" in output
    assert "the learner ended" not in output


def test_a_drain_does_not_wait_for_a_worker_stopped_in_a_broadcast(start: Callable[..., Run]) -> None:
    # The learner may wait neither for its partial rollouts nor for its Goodbye to the end of the timeout.
    run = start("rollout.num_workers=2", "weights.transport=collective", ENDLESS, "launcher.drain_timeout_s=12")
    run.wait_for(lambda: any(record.num_workers == 2 for record in run.records()))
    stopped = run.children("areal_rloo.rollout")[0]
    stopped.suspend()
    since = len(run.records())
    run.wait_for(lambda: len(run.records()) > since)  # its weights are offered to both
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    assert_drained(run)
    assert not stopped.is_running()
    assert "restart in" not in (run.folder / "logs" / "launcher.log").read_text()


def test_the_next_launcher_frees_the_memory_of_a_killed_run(start: Callable[..., Run]) -> None:
    run = start(ENDLESS)
    run.wait_for(lambda: len(run.records()) >= 1)
    (learner,) = run.children("areal_rloo.learner")
    (left,) = {path.parent for path in _open_files(learner.pid) if path.parent.name.startswith("areal_rloo-segments-")}
    processes = [run.process, *psutil.Process(run.process.pid).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        process.kill()
    run.process.wait()
    assert left.is_dir()
    other = start("learner.num_train_steps=1", name="other")
    other.wait_for((other.folder / "config.yaml").exists)
    assert not left.exists()
    code, output = other.wait()
    assert code == 0, output
    assert "preparing the tiny model" not in output, "the model is in the cache"


def _open_files(pid: int) -> set[Path]:
    return {number.readlink() for number in Path(f"/proc/{pid}/fd").iterdir() if number.is_symlink()}


def test_a_launcher_without_standard_streams_keeps_its_locks(start: Callable[..., Run], tmp_path: Path) -> None:
    closed = ("bash", "-c", 'exec "$@" <&- >&- 2>&-', "closed")
    run = start(ENDLESS, before=closed)
    eventually(lambda: len(run.records()) >= 1, "no train step")
    streams = [str(Path(f"/proc/{run.process.pid}/fd/{number}").readlink()) for number in range(3)]
    run.process.send_signal(signal.SIGTERM)
    code, _ = run.wait()
    assert code == 0
    assert streams == [os.devnull] * 3
    assert_drained(run)


def test_a_process_that_cannot_be_started_ends_the_run_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"]
    (tmp_path / "run" / "logs" / "warm_start.out").mkdir(parents=True)  # no log can be opened
    lock_path(tmp_path / "run", "launcher").touch()  # the folder of a run
    ended = subprocess.run([*command, f"run.folder={tmp_path / 'run'}"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: a process cannot be started: ")
    assert ended.stderr.count("\n") == 1
