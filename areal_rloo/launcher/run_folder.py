"""The run folder: where a run keeps everything, and which one a resume goes on with."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.config import Config, dump_config
from areal_rloo.errors import CheckpointError, PreflightError
from areal_rloo.launcher.placement import Host
from areal_rloo.wire.security import make_keys

SCRIPT = "job.sbatch"  # of a Slurm job

_LATEST = Path("runs") / "latest"
_SUBMITTED = "submitted-{}.yaml"


def choose_folder(config: Config, *, resume: bool) -> Path:
    """`run.folder`, or runs/<name>-<time>; on a resume without a folder, the newest run.

    Raises:
        CheckpointError: there is no run to resume.
        PreflightError: the folder holds a run already, and this is no resume.
    """
    if config.run.folder is not None:
        folder = Path(config.run.folder).resolve()
    elif resume:
        folder = _LATEST.resolve()
    else:
        folder = (Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
        if folder.exists():  # a second run in the same second
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
    holds_run = has_begun(folder) or any(folder.glob(_SUBMITTED.format("*")))
    if resume and not holds_run:
        raise CheckpointError(f"--resume: {folder} holds no run; expected the folder of one in run.folder")
    if holds_run and not resume:
        raise second_run(folder)
    return folder


def has_begun(folder: Path) -> bool:
    """Whether a run was started in this folder; one that was only submitted was not."""
    return (folder / "config.yaml").exists()


def second_run(folder: Path) -> PreflightError:
    """What is said of a start in a folder that another run has."""
    return PreflightError(f"run.folder: {folder} holds a run already; add --resume to go on with it, or choose another")


def submitted_file(folder: Path) -> Path:
    """For a config on its way to a job, which finds out what it becomes on its hosts. Each submission has its own: a
    job that is there already may be started again, and is to find what it was submitted with."""
    return folder / _SUBMITTED.format(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def write_beginning(folder: Path, config: Config, hosts: Sequence[Host]) -> None:
    """The resolved config, the environment, and CURVE keys where the wire needs them; runs/latest points here.

    Of a folder that is resumed, the summary goes: it says how the run ended the last time.
    """
    fresh = folder / ".config.yaml"  # renamed, so that no process of an earlier start ever reads half of it
    fresh.write_text(dump_config(config), encoding="utf-8")
    fresh.rename(folder / "config.yaml")
    (folder / "summary.json").unlink(missing_ok=True)  # says how an earlier start ended
    if config.curve and not (folder / "keys").exists():  # a process of an earlier start may still have them
        make_keys(folder / "keys")
    packages = ("torch", "transformers", "pyzmq", "msgspec", "numpy", "areal-rloo")
    environment = {
        "python": sys.version,
        "platform": platform.platform(),
        "hosts": hosts,
        "packages": {name: _version(name) for name in packages},
        "command": sys.argv,
    }
    (folder / "environment.json").write_bytes(msgspec.json.format(msgspec.json.encode(environment), indent=2))
    point_latest(folder)


def point_latest(folder: Path) -> None:
    """Let runs/latest be this run, where it is in a folder of that name."""
    if folder.parent.name == _LATEST.parent.name:
        fresh = folder.with_name(f".latest-{os.getpid()}")
        with contextlib.suppress(OSError):  # a file system without links; the folder is named in the output anyway
            fresh.symlink_to(folder.name)
            fresh.rename(folder.with_name(_LATEST.name))


def seed_folder(folder: Path, config: Config, seed: int) -> Path:
    """Of one job of an array of seeds; the run folder itself where there is no array."""
    return folder if config.launcher.slurm.num_seeds == 1 else folder / f"seed-{seed}"


def newest_checkpoint(folder: Path) -> str | None:
    """The name of the newest checkpoint of a run, or None."""
    return max((path.name for path in (folder / "checkpoints").glob("step-*")), default=None)


def is_finished(folder: Path) -> bool:
    """Whether the learner says in its summary that there is nothing more to train."""
    try:
        summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
    return summary["exit_reason"] in ("completed", "end_of_data")


def segment_folder(folder: Path) -> Path:
    """Where a run's shared memory lies: a name now, made by the learner, removed by the launcher when all is over.

    It follows from the run folder, so that a start after a kill finds what the one before has left, and clears it.
    """
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"areal_rloo-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
