"""The section `launcher`: hosts, restarts, Slurm and containers. docs/deploy.md shows complete setups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from areal_rloo.config.section import (
    Bytes,
    Count,
    CountOrNone,
    Natural,
    Seconds,
    Section,
    owned_mistakes,
    path_mistakes,
)
from areal_rloo.errors import shown

_TIME = re.compile(r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,6}){0,2}")  # see _seconds
_ARGUMENT = re.compile(r"-{0,2}[A-Za-z][A-Za-z0-9_-]*")
_WARNS_EARLY_S = 60  # Slurm may send --signal this much early (manual of sbatch)
_OWNED = {  # options of sbatch that the launcher sets
    "nodes": "set launcher.num_hosts",
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "the launcher starts an own step for each process"),
    "array": "set launcher.slurm.num_seeds",
    "signal": "set launcher.slurm.warn_before_s",
    **dict.fromkeys(("requeue", "no-requeue"), "set launcher.slurm.requeue"),
    **dict.fromkeys(("output", "error"), "the file is job.out, or job-<index>.out, in the run folder"),
    "job-name": "set run.name",
    "gpus-per-node": "set launcher.gpus_per_host",
    "cpus-per-task": "set launcher.cores_per_host",
    "mem": "set launcher.memory_per_host",
    "time": "set launcher.slurm.time_limit",
    "partition": "set launcher.slurm.partition",
    "account": "set launcher.slurm.account",
    "exclusive": "leave launcher.cores_per_host out",
    "open-mode": "the mode is append, so that a requeued job keeps its output",
    "wait": "give --wait to the launcher",
}


class SlurmConfig(Section, frozen=True):
    """Submission of a job; only the Slurm launcher reads this section."""

    partition: str | None = None  # null: that of the site
    account: str | None = None  # null: that of the user
    time_limit: str | None = None  # as sbatch takes it: 30, 1:30:00, 2-12; null: the site's
    # This long before the limit the job gets a signal, drains and is requeued
    warn_before_s: Annotated[int, msgspec.Meta(ge=1, le=30 * 86400)] = 300
    requeue: bool = True  # false: a job at the time limit drains and ends
    num_seeds: Count = 1  # above 1: a job array with run.seed, run.seed + 1, ... and a folder for each
    # More options of sbatch, by name.
    arguments: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    setup: str = ""  # shell lines before the run: modules, an environment, variables


class ContainerConfig(Section, frozen=True):
    """The container for the processes of a Slurm job."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"  # starts the processes of a step in the image
    image: str | None = None  # path or name for the runtime; null with runtime=none
    mounts: tuple[str, ...] = ()  # SOURCE:TARGET, besides the run folder and the submission folder


class LauncherConfig(Section, frozen=True):
    # Of the run; in a larger Ray cluster, Ray may use the other hosts too
    num_hosts: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    cores_per_host: CountOrNone = 0  # for the run; 0: all
    gpus_per_host: CountOrNone | None = None  # for the run; null: all
    memory_per_host: Bytes = 0  # of the run, for the plan; 0: all
    memory_per_gpu: Bytes = 0  # for the plan; 0: as the driver says
    max_restarts: Natural = 10  # of each rollout worker, within a day
    max_learner_restarts: Natural = 2  # from the newest checkpoint, while the workers continue; also of a warm start
    drain_timeout_s: Seconds = 60.0  # time of all processes for the last checkpoint and their end
    # A process whose event loop stands still for this long, or whose embedded engine decodes and makes no token, ends
    # with exit code 1 and is restarted; null: never.
    hang_timeout_s: Seconds | None = 600.0
    place_timeout_s: Seconds = 600.0  # until Ray has room for all processes, or for restarted processes
    min_free_disk_bytes: Natural = 200 * 2**20  # a start needs this much free disk
    slurm: SlurmConfig = SlurmConfig()
    container: ContainerConfig = ContainerConfig()


def launcher_mistakes(launcher: LauncherConfig) -> Iterator[str]:
    """Check dependent options; give the text of each error."""
    slurm, container = launcher.slurm, launcher.container
    for name in ("memory_per_host", "memory_per_gpu"):
        if 0 < getattr(launcher, name) < 2**20:
            yield (
                f"launcher.{name}: expected bytes, at least 1048576, or 0 for all, got "
                f"{getattr(launcher, name)}; 24 GB are 24000000000"
            )
    if slurm.time_limit is not None and not _TIME.fullmatch(slurm.time_limit):
        yield (
            f"launcher.slurm.time_limit: expected minutes, hours:minutes:seconds or days-hours:minutes:seconds, got "
            f"'{shown(slurm.time_limit)}'"
        )
    elif slurm.time_limit is not None and 0 < _seconds(slurm.time_limit) <= slurm.warn_before_s + _WARNS_EARLY_S:
        yield (
            f"launcher.slurm.time_limit: expected more than launcher.slurm.warn_before_s={slurm.warn_before_s} and a "
            f"minute (Slurm may warn early), got '{slurm.time_limit}'; the warning would come at the start of the job"
        )
    yield from owned_mistakes("launcher.slurm.arguments", slurm.arguments, _OWNED)
    yield from _lines_mistakes(slurm)
    yield from path_mistakes("launcher.container.image", container.image)
    if slurm.warn_before_s <= launcher.drain_timeout_s:
        yield (
            f"launcher.slurm.warn_before_s: expected more than launcher.drain_timeout_s={launcher.drain_timeout_s:g}, "
            f"the time for the last checkpoint, got {slurm.warn_before_s}"
        )
    if (container.runtime == "none") != (container.image is None):
        yield (
            f"launcher.container.image: expected an image with runtime pyxis or apptainer, and null with none, got "
            f"runtime={container.runtime} and image={container.image}"
        )
    for mount in container.mounts:
        if mount.count(":") not in (1, 2) or not mount.startswith("/"):
            yield f"launcher.container.mounts: expected /SOURCE:/TARGET, got '{mount}'"


def _lines_mistakes(slurm: SlurmConfig) -> Iterator[str]:
    """Refuse texts that would end a line of the job script."""
    for name in slurm.arguments:
        if not _ARGUMENT.fullmatch(name):
            yield f"launcher.slurm.arguments: expected names of options of sbatch, got '{shown(name)}'"
    arguments = {f"arguments.{name}": value for name, value in slurm.arguments.items()}
    for name, value in {"partition": slurm.partition, "account": slurm.account, **arguments}.items():
        if isinstance(value, str) and not value.isprintable():
            yield f"launcher.slurm.{name}: expected a single line, got '{shown(value)}'"


def _seconds(time_limit: str) -> int:
    """Seconds of a limit in a format of sbatch: m, m:s, h:m:s, d-h, d-h:m or d-h:m:s; 0 is no limit."""
    days, has_days, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not has_days and len(parts) < 3:
        parts.insert(0, 0)  # hours
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
