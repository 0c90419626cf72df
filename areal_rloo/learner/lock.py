"""Locks a run folder for one launcher and one learner: a second one would overwrite files of the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import BaseFileLock

from areal_rloo.errors import PreflightError
from areal_rloo.files import lock_file
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import wait_until

logger = get_logger(__name__)

Role = Literal["launcher", "learner"]

DEAD_HOST_S = 180.0  # NFS keeps the lock of a crashed host for a while
_LOOK_EVERY_S = 0.2
_HELD_TO_THE_END: list[BaseFileLock] = []  # filelock releases a lock without references


@dataclass(frozen=True, slots=True)
class Patience:
    """How to wait for another holder: print a line with `say`, then wait some seconds or until `stops` is true."""

    seconds: float
    say: Callable[[str], None]
    stops: Callable[[], bool] = lambda: False


def lock_run_folder(folder: Path, role: Role, patience: Patience) -> None:
    """Lock the folder for this role until this process ends, also by a crash.

    Raises PreflightError if another process holds the lock after the wait. A folder on a file system without locks
    stays unlocked, with a warning.
    """

    def is_settled() -> bool:
        try:
            lock = lock_file(lock_path(folder, role))
        except OSError as error:
            logger.warning("%s has no locks (%s): make sure that no other run uses it", folder, error)
            return True
        if lock is not None:
            _HELD_TO_THE_END.append(lock)
        return lock is not None

    _wait_until(is_settled, folder, role, patience)


def wait_for_learner(folder: Path, patience: Patience) -> None:
    """Wait until no learner holds the folder, or raise PreflightError.

    The learner of a killed launcher drains, and holds the folder until then.
    """
    _wait_until(lambda: not is_in_use(folder), folder, "learner", patience)


def is_in_use(folder: Path, role: Role = "learner") -> bool:
    path = lock_path(folder, role)
    if not path.exists():
        return False
    try:
        lock = lock_file(path)
    except OSError:  # no locks on this file system
        return False
    if lock is not None:
        lock.release()
    return lock is None


def _wait_until(condition: Callable[[], bool], folder: Path, role: Role, patience: Patience) -> None:
    if condition():
        return
    if patience.seconds > 0.0 and not patience.stops():
        patience.say(f"{folder} is in use by another {role}; waiting up to {patience.seconds:.0f} s for its end")
    if not wait_until(condition, timeout_s=patience.seconds, look_every_s=_LOOK_EVERY_S, stops=patience.stops):
        raise PreflightError(
            f"run.folder: {folder} is in use by another {role}; wait for its end (some minutes where its host died "
            "and the folder is on NFS), or choose another folder"
        )


def lock_path(folder: Path, role: Role) -> Path:
    """Name the file of a lock in the run folder."""
    return folder / f".{role}-lock"
