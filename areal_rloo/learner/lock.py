"""One launcher and one learner a run folder: two would write the same files, each its own."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal_rloo.errors import PreflightError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

Role = Literal["launcher", "learner"]

DEAD_HOST_S = 180.0  # NFS keeps the lock of a host that died for a while
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Patience:
    """How to wait for the end of another one.

    Attributes:
        seconds: for so long.
        say: is called with a line before.
        stops: whether to give up at once.
    """

    seconds: float
    say: Callable[[str], None]
    stops: Callable[[], bool] = lambda: False


def lock_run_folder(folder: Path, role: Role, patience: Patience) -> None:
    """Hold the folder, in this role, until this process ends, however it ends. A file system without locks is taken as
    it is.

    Args:
        folder: the run folder.
        role: what this process is to the run.
        patience: with another one.

    Raises:
        PreflightError: another one holds it.
    """

    def is_settled() -> bool:
        held = _try_to_hold(folder, role)
        if held is None:
            logger.warning("%s has no locks: see to it that no other run uses it", folder)
        return held != 0

    _wait_until(is_settled, folder, role, patience)


def wait_for_learner(folder: Path, patience: Patience) -> None:
    """Until no learner holds the folder: one whose launcher was killed drains, and holds it until then. Arguments and
    errors are those of `lock_run_folder`."""
    _wait_until(lambda: not is_in_use(folder), folder, "learner", patience)


def is_in_use(folder: Path) -> bool:
    """Whether a learner holds the folder now."""
    if not (folder / _name("learner")).exists():
        return False
    held = _try_to_hold(folder, "learner")
    if held:
        os.close(held)
    return held == 0


def _wait_until(condition: Callable[[], bool], folder: Path, role: Role, patience: Patience) -> None:
    ends_s = time.monotonic() + patience.seconds
    said = False
    while not condition():
        if time.monotonic() > ends_s or patience.stops():
            raise PreflightError(
                f"run.folder: {folder} is in use by another {role}; wait for its end (some minutes where its host died "
                "and the folder is on NFS), or choose another folder"
            )
        if not said:
            patience.say(f"{folder} is in use by another {role}; waiting up to {patience.seconds:.0f} s for its end")
        said = True
        time.sleep(_LOOK_EVERY_S)


def _name(role: Role) -> str:
    return f".{role}-lock"


def _try_to_hold(folder: Path, role: Role) -> int | None:
    """The descriptor that holds it; 0 where another has it, None where nobody can."""
    try:
        descriptor = os.open(folder / _name(role), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return 0
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
