"""A small whole run under a launcher, which tests can watch, signal and read."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from support.processes import command_of, ends_of_logs, processes_with

from areal_rloo.launcher.run_folder import newest_checkpoint
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord

REPO = Path(__file__).resolve().parents[2]
SMALL = [
    "model.tiny.warm_start=null",
    "model.tiny.hidden_size=48",
    "model.tiny.num_layers=2",
    "data.eval.num_prompts=8",
    "rollout.num_slots=16",
    "rollout.sampling.max_new_tokens=24",
    "algorithm.group_size=4",
    "learner.groups_per_step=4",
    "learner.num_train_steps=5",
    "evaluation.every_n_versions=2",
    "checkpoint.every_n_steps=2",
    "wire.heartbeat_s=0.2",
    "wire.heartbeat_timeout_s=30",
    "launcher.drain_timeout_s=60",
    "launcher.max_learner_restarts=0",
]
SENDS_GARBAGE = (  # for `further_worker`
    "import os; import areal_rloo.wire.channels as channels; "
    "channels.encode = lambda message: [os.urandom(1 + os.urandom(1)[0]) for _ in range(1 + os.urandom(1)[0] % 4)]"
)


class Run:
    """A launcher process and its run folder."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        small: Sequence[str] = SMALL,
        config: str = "quickstart.yaml",
        launcher: str = "local",
        before: Sequence[str] = (),
        entry: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`small`: changes of the config; `before`: in front of the command, as `nsenter ...`; `entry`: the user's."""
        self.folder = folder
        script = [] if entry is None else [str(entry)]
        own = (f"run.folder={folder}", f"telemetry.targets_folder={folder.parent / 'targets'}")
        command = [sys.executable, "-m", f"areal_rloo.launcher.{launcher}", *script, "--config", config]
        self.process = subprocess.Popen(
            [*before, *command, *with_last_values(*own, *small, *arguments)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )

    def wait(self) -> tuple[int, str]:
        """Wait for the end, as long as the run records steps: a slow machine is no failure."""
        metrics, recorded_bytes = self.folder / "metrics.jsonl", 0
        while True:
            try:
                output, _ = self.process.communicate(timeout=240)
            except subprocess.TimeoutExpired as error:
                before, recorded_bytes = recorded_bytes, metrics.stat().st_size if metrics.exists() else 0
                if recorded_bytes == before:
                    raise AssertionError(f"the run does not end: {self._stacks_and_logs()}") from error
            else:
                return self.process.returncode, output

    def records(self) -> list[TrainRecord]:
        return [r for r in read_records(self.folder / "metrics.jsonl") if isinstance(r, TrainRecord)]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def children(self, module: str) -> list[psutil.Process]:
        found = processes_with(["-m", module, f"--run-folder={self.folder}"])
        return [
            process for process in found if command_of(process)[1:3] == ["-m", module]
        ]  # no srun around the process

    def rank(self, number: int) -> psutil.Process:
        (found,) = processes_with([f"--rank={number}"], self.children("areal_rloo.learner"))
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + 300
        while not condition():
            assert self.process.poll() is None, self.wait()
            assert time.monotonic() < ends_s, f"the run makes no progress: {self._stacks_and_logs()}"
            time.sleep(0.05)

    def wait_for_checkpoint(self, num_steps: int) -> None:
        """Wait for a checkpoint after at least `num_steps` steps; the run removes older checkpoints."""
        self.wait_for(lambda: self.saved_steps() >= num_steps)

    def saved_steps(self) -> int:
        """Return the number of steps before the newest checkpoint; 0 without a checkpoint."""
        newest = newest_checkpoint(self.folder)
        return 0 if newest is None else int(newest.removeprefix("step-"))

    def _stacks_and_logs(self) -> str:
        """Have the processes log their stacks, and return the ends of all logs."""
        for process in (*self.children("areal_rloo.learner"), *self.children("areal_rloo.rollout")):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR2)
        time.sleep(2)
        return ends_of_logs((self.folder / "logs").glob("*.log"), num_lines=200)


def with_last_values(*arguments: str) -> Iterable[str]:
    """Keep the last override of each key, and all options."""
    return {argument if argument[0] == "-" else argument.partition("=")[0]: argument for argument in arguments}.values()


def assert_drained(run: Run) -> None:
    """Check that the run ended with a checkpoint of the last version and a balanced ledger."""
    summary = run.summary()
    assert summary["exit_reason"] == "drained"
    assert balanced(summary["ledger"])
    assert (run.folder / "checkpoints" / f"step-{summary['policy_version']:06d}").is_dir()


def assert_kills_cost_nothing(run: Run) -> None:
    """Of a run of 32 steps with two ranks, kill a worker and, each after a checkpoint, the learner's rank 0, then its
    rank 1; each sample is trained on once."""
    run.wait_for(lambda: len(run.records()) >= 2)
    run.children("areal_rloo.rollout")[0].kill()
    for rank, after in ((0, 4), (1, 10)):
        run.wait_for_checkpoint(after)
        run.rank(rank).kill()
    code, output = run.wait()
    assert code == 0, output
    assert output.count("the learner restarts from step-0000") == 2, output
    summary = run.summary()
    assert summary["num_train_steps"] == 32
    assert balanced(summary["ledger"])
    assert summary["ledger"]["trained"] == 32 * 16
    assert summary["ledger"]["dropped"].keys() <= {"stale"}, "the prompts come again"
    assert [record.num_train_steps for record in run.records()] == list(range(1, 33))


def gone(run: Run) -> bool:
    ends_s = time.monotonic() + 120
    while run.children("areal_rloo.learner") or run.children("areal_rloo.rollout"):
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.1)
    return True


def balanced(ledger: dict[str, Any]) -> bool:
    parts = ledger["trained"] + sum(ledger["dropped"].values()) + ledger["buffered"] + ledger["in_flight"]
    return bool(ledger["admitted"] == parts)


@contextlib.contextmanager
def further_worker(run: Run, change: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a further worker, rollout-7, whose code is changed by a statement."""
    run.wait_for(lambda: bool(run.children("areal_rloo.rollout")))
    (first, *_) = sorted(command_of(worker) for worker in run.children("areal_rloo.rollout"))
    options = [option for option in first[3:] if not option.startswith("--worker-id=")]
    code = f"{change}; import runpy; runpy.run_module('areal_rloo.rollout', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, *options, "--worker-id=rollout-7"]
    with subprocess.Popen(command, cwd=REPO, stderr=subprocess.DEVNULL) as worker:
        try:
            yield worker
        finally:
            worker.kill()
