"""Processes as steps of a Slurm job: each is a task of an `srun` of its own, on the node the plan says.

An srun passes USR1 on to its task, and takes TERM as an order to kill it (Slurm 22.05); so USR1 is how a step is told
to end well. A step sees all of the job's cores on its node, since those are shared out by threads, and the GPUs that
the plan gives it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from areal_rloo.config import LauncherConfig
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.processes import LocalProcess

# A step sees its job's GPUs, renumbered from 0 or not, as the site has it: the plan's are places in what it sees.
_CHOOSE_GPUS = """
import os, sys
seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(64)))
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[int(place)] for place in sys.argv[1].split(","))
os.execvp(sys.argv[2], sys.argv[2:])
"""


class StepStarter:
    """Starts steps in the job that this process is the script of."""

    restarts = False

    def __init__(self, launcher: LauncherConfig, folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder

    def start(self, spec: ProcessSpec, log: Path) -> Step:
        """Start a step whose output is appended to a file."""
        with log.open("ab") as output:
            # Not bound: when the job's script is gone, Slurm tells the tasks; and an srun that is killed leaves a child
            # which has Slurm end the task.
            process = LocalProcess(step_command(spec, self._launcher, self._folder), os.environ, output, bound=False)
        return Step(process, f"step on {spec.host}")

    def close(self) -> None:
        """Steps end with their job."""


class Step:
    """An srun, and through it its task."""

    def __init__(self, srun: LocalProcess, label: str) -> None:
        self._srun = srun
        self.label = label

    def exit_code(self) -> int | None:
        """The task's; None while it runs."""
        return self._srun.exit_code()

    def signal(self, number: int) -> None:
        """Tell the task to end well, whatever the number."""
        self._srun.signal(signal.SIGUSR1)

    def kill(self) -> None:
        """The task goes with its srun."""
        self._srun.kill()


def step_command(spec: ProcessSpec, launcher: LauncherConfig, folder: Path) -> tuple[str, ...]:
    """The srun of a process.

    Args:
        spec: of the plan.
        launcher: for the container.
        folder: the run folder, which a container needs too.
    """
    variables = dict(spec.environment)
    choose: tuple[str, ...] = ()
    if spec.gpu_ids:
        choose = ("-S", "-c", _CHOOSE_GPUS, variables.pop("CUDA_VISIBLE_DEVICES"))
    words = tuple(f"{name}={value}" for name, value in variables.items())
    container = launcher.container
    mounts = (f"{folder}:{folder}", f"{Path.cwd()}:{Path.cwd()}", *container.mounts)
    inside = _task("python3", words, choose, spec)  # our own Python is not in an image
    options: tuple[str, ...] = ()
    match container.runtime:
        case "none":
            task = _task(spec.command[0], words, choose, spec)
        case "pyxis":
            options = (
                f"--container-image={container.image}",
                f"--container-mounts={','.join(mounts)}",
                f"--container-workdir={Path.cwd()}",
            )
            task = inside
        case "apptainer":
            gpus = ("--nv",) if spec.gpu_ids else ()
            binds = tuple(f"--bind={mount}" for mount in mounts)
            task = ("apptainer", "exec", *gpus, *binds, f"--pwd={Path.cwd()}", str(container.image), *inside)
    return (
        "srun",
        f"--job-name={spec.name}",
        f"--nodelist={spec.host}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",  # every step may use what the others use: the job is all ours
        "--cpu-bind=none",
        "--mem=0",
        "--kill-on-bad-exit=1",
        *options,
        *task,
    )


def _task(python: str, variables: tuple[str, ...], choose: tuple[str, ...], spec: ProcessSpec) -> tuple[str, ...]:
    command = (python, *spec.command[1:])
    return ("env", *variables, *((python, *choose) if choose else ()), *command)
