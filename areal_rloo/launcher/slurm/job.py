"""`python -m areal_rloo.launcher.slurm.job`: a run inside a Slurm job, on the first node.

    nodes of the job ─► plan ─► a step for each process ─► the learner's exit code, or a checkpoint and a requeue

SIGUSR1, which Slurm sends before the time limit, drains the run and requeues the job. A preemption does the same; Slurm
then signals only the steps. SIGTERM, from scancel, drains and ends. A requeued job resumes from the newest checkpoint.

A step is an `srun` with a single task, on the node of the plan. An srun passes SIGUSR1 on to the task, but kills the
task on SIGTERM (Slurm 22.05); SIGUSR1 therefore asks a step to drain. A step may use all cores of the job on its node,
since thread counts share the cores, and its GPUs of the plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import LauncherConfig, import_entry, is_loopback, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.launcher.fleet import AllocatedRoom
from areal_rloo.launcher.hosts import capped
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.processes import LocalProcess
from areal_rloo.launcher.run_folder import has_begun
from areal_rloo.launcher.start import begin, hold, look, placed
from areal_rloo.learner.checkpoint_folder import folder_of, standing
from areal_rloo.ports import ReservedPorts, address_towards, look_up
from areal_rloo.program import run_main
from areal_rloo.standard_streams import stamp_lines
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_MIB = 2**20
# Some sites renumber the GPUs of a step from 0. The plan's ids are positions in the step's list.
_CHOOSE_GPUS = """
import os, sys
seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(64)))
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[int(place)] for place in sys.argv[1].split(","))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def main(arguments: Sequence[str]) -> int:
    """Run the job; give the learner's exit code.

    Raises:
        UserError: the user must correct something; nothing was started.
    """
    signals = Signals().install(with_usr1=True)
    stamp_lines()
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.launcher.slurm.job")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--submitted", required=True, help="the file in the run folder with the config")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    submitted = load_config(str(options.run_folder / options.submitted))
    seed = submitted.run.seed + int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    folder = options.run_folder if submitted.launcher.slurm.num_seeds == 1 else options.run_folder / f"seed-{seed}"
    run = msgspec.structs.replace(submitted.run, seed=seed, folder=str(folder))
    config = msgspec.structs.replace(submitted, run=run)
    import_entry(config.run.entry)
    again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    resume = options.resume or (again and has_begun(folder))
    hold(folder, config, resume=resume, again=again, stops=lambda: signals.any)
    config, placement = placed(config, _allocated_hosts(config.launcher))
    look(config, folder, runs_here=config.launcher.container.runtime == "none")
    with ReservedPorts(2) as reserved:
        request = begin(config, placement, folder, ports=reserved.ports, resume=resume, launcher="slurm")
        job = Job(request, StepStarter(config.launcher, folder), AllocatedRoom(), signals)
        code = job.run()
    if not job.unfinished or signals.num_ends or not config.launcher.slurm.requeue:
        return code
    return _requeued(folder)


def _requeued(folder: Path) -> int:
    """Requeue this job; give the exit code.

    Raises:
        PreflightError: the last requeue brought no new checkpoint, or Slurm refuses.
    """
    reached, note = msgspec.json.encode(standing(folder_of(folder))), folder / ".requeued-at"
    if note.exists() and read_regular(note) == reached:
        raise PreflightError(
            "launcher.slurm.time_limit: the job was stopped twice without a new checkpoint in between; raise it, or "
            "lower launcher.slurm.warn_before_s; after a preemption, areal-rloo resume RUN_FOLDER submits it again"
        )
    write_atomically(note, reached)
    array = os.environ.get("SLURM_ARRAY_JOB_ID")  # the last job of an array has the id of the array
    job_id = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    logger.info("there is more to train: requeueing the job")
    _scontrol("requeue", job_id, advice="; areal-rloo resume RUN_FOLDER submits it again")
    return 0


def _allocated_hosts(launcher: LauncherConfig) -> list[Host]:
    """List the nodes of this job in Slurm's order, with the job's share of each; the job script runs on the first.

    Raises:
        PreflightError: this process runs in no Slurm job, or a node's address cannot be resolved.
    """
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if nodelist is None:
        raise PreflightError(
            "SLURM_JOB_NODELIST: not set; this runs inside a job that areal_rloo.launcher.slurm submits"
        )
    names = _scontrol("show", "hostnames", nodelist).split()
    cores = counts_per_node(os.environ["SLURM_JOB_CPUS_PER_NODE"])
    described = _scontrol("--oneliner", "show", "node", nodelist)
    addresses = dict(re.findall(r"NodeName=(\S+).*?NodeAddr=(\S+)", described))
    memory = {name: int(mib) * _MIB for name, mib in re.findall(r"NodeName=(\S+).*?RealMemory=(\d+)", described)}
    share = int(os.environ.get("SLURM_MEM_PER_NODE", "0")) * _MIB
    gpus = launcher.gpus_per_host
    num_gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0")) if gpus is None else gpus
    gpu_ids = tuple(str(index) for index in range(num_gpus))  # a step numbers the GPUs of the job from 0
    hosts = [
        Host(name, _resolved(name, addresses.get(name, name)), cores[index], gpu_ids, share or memory.get(name, 0))
        for index, name in enumerate(names)
    ]
    return [capped(_reachable(host, hosts), launcher) for host in hosts]


def counts_per_node(written: str) -> list[int]:
    """Read Slurm's `4(x2),8` as 4, 4, 8."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", written)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _resolved(name: str, address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        return str(look_up(address, 1)[1][0])
    except OSError as error:
        raise PreflightError(f"node {name}: its address {address} cannot be resolved here: {error}") from error


def _reachable(host: Host, hosts: list[Host]) -> Host:
    """Replace a loopback address, as Debian gives a host's own name, by the address on the route to others."""
    others = [other.address for other in hosts if not is_loopback(other.address)]
    if not is_loopback(host.address) or not others:
        return host
    return dataclasses.replace(host, address=address_towards(others[0]))


def _scontrol(*arguments: str, advice: str = "") -> str:
    ended = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise PreflightError(f"scontrol {' '.join(arguments)}: {' '.join(ended.stderr.split())}{advice}")
    return ended.stdout


class StepStarter:
    """Starts steps; this process is the script of the job. Slurm ends the steps with the job."""

    restarts = False

    def __init__(self, launcher: LauncherConfig, folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder

    def start(self, spec: ProcessSpec, log: Path) -> Step:
        with log.open("ab") as output:
            # Not bound: Slurm ends the tasks when the job's script dies, and a killed srun leaves a child that asks
            # Slurm to end the task.
            step = Step(step_command(spec, self._launcher, self._folder), os.environ, output, bound=False)
        step.label = f"step on {spec.host}"
        return step

    def close(self) -> None:
        pass


class Step(LocalProcess):
    """An srun with a task. Slurm kills the task of a killed srun."""

    def signal(self, number: int) -> None:
        """Ask the task to drain; the number does not matter."""
        super().signal(signal.SIGUSR1)


def step_command(spec: ProcessSpec, launcher: LauncherConfig, folder: Path) -> tuple[str, ...]:
    """Make the srun command of a process; a container mounts the run folder."""
    variables = dict(spec.environment)
    choose: tuple[str, ...] = ()
    if spec.gpu_ids:
        choose = ("-S", "-c", _CHOOSE_GPUS, variables.pop("CUDA_VISIBLE_DEVICES"))
    words = tuple(f"{name}={value}" for name, value in variables.items())
    container = launcher.container
    python = spec.command[0] if container.runtime == "none" else "python3"  # an image has no copy of this Python
    withheld = tuple(f"--unset={name}" for name in spec.withheld)
    task = ("env", *withheld, *words, *((python, *choose) if choose else ()), python, *spec.command[1:])
    mounts = (f"{folder}:{folder}", f"{Path.cwd()}:{Path.cwd()}", *container.mounts)
    options: tuple[str, ...] = ()
    if container.runtime == "pyxis":
        options = (
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={Path.cwd()}",
        )
    elif container.runtime == "apptainer":
        gpus = ("--nv",) if spec.gpu_ids else ()
        binds = tuple(f"--bind={mount}" for mount in mounts)
        task = ("apptainer", "exec", *gpus, *binds, f"--pwd={Path.cwd()}", str(container.image), *task)
    return (
        "srun",
        f"--job-name={spec.name}",
        f"--nodelist={spec.host}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",  # steps share the resources of the job
        "--cpu-bind=none",
        "--mem=0",
        "--kill-on-bad-exit=1",
        *options,
        *task,
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
