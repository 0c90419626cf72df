"""The section `launcher`: the hosts of a run, what is started again, and what Slurm and containers need to know.

docs/deploy.md has a setup for a laptop, one node of GPUs, Slurm and Kubernetes.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from areal_rloo.config.engines import refuse_owned
from areal_rloo.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from areal_rloo.errors import ConfigError

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")  # see _seconds
_WARNS_EARLY_S = 60  # as the manual of sbatch says of --signal

# What we say to sbatch ourselves, and where the user says it instead.
_OWNED = {
    "nodes": "set launcher.num_hosts",
    "ntasks": "each process of the plan is a step of its own",
    "ntasks-per-node": "each process of the plan is a step of its own",
    "array": "set launcher.slurm.num_seeds",
    "signal": "set launcher.slurm.warn_before_s",
    "requeue": "set launcher.slurm.requeue",
    "no-requeue": "set launcher.slurm.requeue",
    "output": "it is job.out, or job-<index>.out, in the run folder",
    "job-name": "set run.name",
    "gpus-per-node": "set launcher.gpus_per_host",
    "cpus-per-task": "set launcher.cores_per_host",
    "mem": "set launcher.memory_per_host",
    "time": "set launcher.slurm.time_limit",
    "partition": "set launcher.slurm.partition",
    "account": "set launcher.slurm.account",
    "exclusive": "leave launcher.cores_per_host out",
    "error": "it is job.out, or job-<index>.out, in the run folder",
    "open-mode": "it is append, so that a requeued job writes on",
    "wait": "say --wait to the launcher",
}


class SlurmConfig(Section, frozen=True):
    """How a job is submitted; only the Slurm launcher reads it."""

    partition: str | None = None
    account: str | None = None
    time_limit: str | int | None = None  # in quotes, as sbatch takes it: "30", "1:30:00", "2-12"; null: the site's
    warn_before_s: PositiveInt = 300  # before the limit the job gets a signal, drains and is queued again
    requeue: bool = True  # false: a job that reaches its time limit drains and ends
    num_seeds: PositiveInt = 1  # more: an array of jobs, with run.seed, run.seed + 1, ... and a folder each
    arguments: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)  # more of sbatch's own
    setup: str = ""  # lines of shell before the run: modules, an environment, variables


class ContainerConfig(Section, frozen=True):
    """The container that the processes of a Slurm job run in."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None
    mounts: tuple[str, ...] = ()  # SOURCE:TARGET, beside the run folder and the folder of the submission


class LauncherConfig(Section, frozen=True):
    num_hosts: PositiveInt = 1  # in a Ray cluster that has more, Ray may use those too
    cores_per_host: NonNegativeInt = 0  # that the run may use; 0: all that are there
    gpus_per_host: NonNegativeInt | None = None  # null: all that are there
    memory_per_host: NonNegativeInt = 0  # bytes; 0: all that is there
    max_restarts: NonNegativeInt = 10  # of each rollout worker
    max_learner_restarts: NonNegativeInt = 2  # of the learner, from its newest checkpoint, while the workers go on
    drain_timeout_s: PositiveFloat = 60.0
    place_timeout_s: PositiveFloat = 600.0  # until Ray has hosts and room for everything, or for what is started again
    min_free_disk_bytes: NonNegativeInt = 200 * 2**20
    slurm: SlurmConfig = SlurmConfig()
    container: ContainerConfig = ContainerConfig()


def validate_launcher(launcher: LauncherConfig) -> None:
    """Check what no single field can check.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    slurm, container = launcher.slurm, launcher.container
    if isinstance(slurm.time_limit, int):
        raise ConfigError(
            f"launcher.slurm.time_limit: expected text in quotes inside the value, as launcher.slurm.time_limit="
            f"'\"1:30:00\"', got the number {slurm.time_limit}, as which YAML reads 1:30:00 too"
        )
    if slurm.time_limit is not None and not _TIME.fullmatch(slurm.time_limit):
        raise ConfigError(
            f"launcher.slurm.time_limit: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds, got "
            f"'{slurm.time_limit}'"
        )
    needed_s = slurm.warn_before_s + _WARNS_EARLY_S
    if slurm.time_limit is not None and 0 < _seconds(slurm.time_limit) <= needed_s:  # 0 is no limit
        raise ConfigError(
            f"launcher.slurm.time_limit: expected more than launcher.slurm.warn_before_s={slurm.warn_before_s} and a "
            f"minute, by which Slurm may warn early, got '{slurm.time_limit}'; else the job is told to end as it starts"
        )
    refuse_owned("launcher.slurm.arguments", slurm.arguments, _OWNED)
    if slurm.warn_before_s <= launcher.drain_timeout_s:
        raise ConfigError(
            f"launcher.slurm.warn_before_s: expected more than launcher.drain_timeout_s={launcher.drain_timeout_s:g}, "
            f"which the checkpoint may take, got {slurm.warn_before_s}"
        )
    if (container.runtime == "none") != (container.image is None):
        raise ConfigError(
            f"launcher.container.image: expected an image with runtime pyxis or apptainer, and null with none, got "
            f"runtime={container.runtime} and image={container.image}"
        )
    for mount in container.mounts:
        if mount.count(":") not in (1, 2) or not mount.startswith("/"):
            raise ConfigError(f"launcher.container.mounts: expected /SOURCE:/TARGET, got '{mount}'")


def _seconds(time_limit: str) -> int:
    """Of a limit as sbatch takes it: m, m:s, h:m:s, d-h, d-h:m or d-h:m:s."""
    days, has_days, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if has_days:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
