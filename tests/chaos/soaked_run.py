"""The run of a soak: a launcher on this machine, the processes of the run by role, and the progress.

The soak is alone in the process namespace, so every process is of the run. The run folder is on a separate small disk,
and /dev/shm belongs to the soak, so both can be full without harm to other programs. trajectories.jsonl is a link to
another disk, because the verdict needs every record.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from support.processes import command_of, ends_of_logs, processes_with, wire_port

from areal_rloo.learner.lock import lock_path
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME

REPO = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")
HEARTBEAT_TIMEOUT_S = 5.0
NUM_WORKERS = 2
CONFIG = (
    *("--config", "quickstart.yaml", f"rollout.num_workers={NUM_WORKERS}"),
    *("data.train.num_prompts=300", "algorithm.group_size=8", "learner.groups_per_step=8"),
    *("learner.optimizer.schedule=constant", "evaluation.every_n_versions=20"),
    *("data.eval.num_prompts=100", "checkpoint.every_n_steps=5", "telemetry.trajectories_per_step=1000000"),
    *("wire.heartbeat_s=0.5", f"wire.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}", "wire.stall_timeout_s=20"),
    "wire.transport=tcp",  # a connection that faults can cut, silence and slow down
    *("weights.timeout_s=5", "rollout.reward_timeout_s=3", "rollout.max_reward_failure_share=0.9"),
    *("launcher.max_restarts=100000", "launcher.max_learner_restarts=1000", "launcher.drain_timeout_s=20"),
    *("launcher.hang_timeout_s=30", "launcher.min_free_disk_bytes=1000000", "telemetry.progress=false"),
)
SLOW_REWARDS, HANGING_ENGINE = "slow-rewards", "hanging-engine"  # files in the folder of the soak
# The reward of the user: 0, but some processes hang, exit or take long.
_HAZARD = """
import os, random, time

def hazard(completion, purpose):
    chance = random.random()
    if os.path.exists("{slow}"):
        time.sleep(random.uniform(0, 1))
    if purpose == "train" and chance < {share}:
        kind = chance / {share}
        time.sleep(3600 if kind < 0.2 else random.uniform(0, 2))
        kind > 0.8 and os._exit(3)
    return 0.0
"""
# The user's entry: the engine that removes the file first never returns from the next step.
_ENTRY = """
import os, time
from areal_rloo.engines.embedded.scheduler import Scheduler

step = Scheduler.step

def hangs(self, *arguments, **options):
    try:
        os.unlink("{hanging}")
    except FileNotFoundError:
        return step(self, *arguments, **options)
    time.sleep(10_000)

Scheduler.step = hangs
"""


class SoakedRun:
    """A run that a soak disturbs."""

    def __init__(self, work: Path, seed: int, *, hazard_share: float, num_train_steps: int) -> None:
        """`hazard_share`: of the completions whose reward is in trouble."""
        self.work, self.folder = work, work / "disk" / "run"
        self.folder.mkdir(parents=True)
        lock_path(self.folder, "launcher").touch()  # a folder with other files would be refused
        (self.folder / FILE_NAME).symlink_to(work / FILE_NAME)
        (work / FILE_NAME).touch()
        hazard = work / "hazard.py"
        hazard.write_text(_HAZARD.format(share=hazard_share, slow=work / SLOW_REWARDS))
        entry = work / "entry.py"
        entry.write_text(_ENTRY.format(hanging=work / HANGING_ENGINE))
        hazards = f"[{{task: arithmetic}}, {{function: '{hazard}:hazard'}}]"
        rewards = (f"data.train.rewards={hazards}", "data.eval.rewards=[]")
        steps = (f"learner.num_train_steps={num_train_steps}", f"run.entry={entry}")
        self._arguments = (*CONFIG, *rewards, *steps, f"run.seed={seed}", f"run.folder={self.folder}")
        self._output = work / "launcher.out"
        self.launcher = self.start()

    def start(self, *, resume: bool = False) -> subprocess.Popen[bytes]:
        """Start the launcher, again after a kill."""
        command = [sys.executable, "-m", "areal_rloo.launcher.local", *self._arguments, *(["--resume"] * resume)]
        with self._output.open("ab") as output:
            self.launcher = subprocess.Popen(
                command,
                cwd=REPO,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.launcher

    def scale(self, num_workers: int) -> subprocess.Popen[bytes]:
        """Ask the launcher for another number of workers."""
        command = [sys.executable, "-m", "areal_rloo.launcher.scale", str(self.folder), f"--workers={num_workers}"]
        return subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def learners(self) -> list[psutil.Process]:
        return self._of("areal_rloo.learner")

    def workers(self) -> list[psutil.Process]:
        return self._of("areal_rloo.rollout")

    def rewards(self) -> list[psutil.Process]:
        """List the processes that score."""
        return [process for process in processes_with(["areal_rloo.rewards"]) if not _is_keeper(process)]

    def keepers(self) -> list[psutil.Process]:
        """List the keepers of the processes that score."""
        return [process for process in processes_with(["areal_rloo.rewards"]) if _is_keeper(process)]

    def port(self) -> int | None:
        """Return the port of the wire; None if there is no learner now."""
        return next((port for learner in self.learners() if (port := wire_port(learner)) is not None), None)

    def num_record_bytes(self) -> int:
        """Return the size of metrics.jsonl: progress if larger than before."""
        try:
            return (self.folder / "metrics.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    def num_steps(self) -> int:
        records = read_records(self.folder / "metrics.jsonl")
        return max((record.num_train_steps for record in records if isinstance(record, TrainRecord)), default=0)

    def ends_of_logs(self) -> str:
        """Return the end of each log, and of the output."""
        return ends_of_logs([self._output, *(self.folder / "logs").glob("*.log")])

    def accuracies(self) -> dict[int, float]:
        """Return the held-out accuracy by version."""
        records = read_records(self.folder / "metrics.jsonl")
        return {record.policy_version: record.accuracy for record in records if isinstance(record, EvalRecord)}

    def _of(self, module: str) -> list[psutil.Process]:
        return [process for process in processes_with([module]) if command_of(process)[1:3] == ["-m", module]]


def _is_keeper(process: psutil.Process) -> bool:
    return any(word.endswith("keeper.py") for word in command_of(process))
