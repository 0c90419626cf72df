"""One learner a run folder: two would write the same checkpoints and metrics, each its own."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from areal_rloo.errors import PreflightError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_NAME = ".learner-lock"
_PATIENCE_S = 180.0  # for the one before: NFS keeps the lock of a host that died for a while
_LOOK_EVERY_S = 0.2


def lock_run_folder(folder: Path) -> None:
    """Hold the folder until this process ends, however it ends. A file system without locks is taken as it is.

    Raises:
        PreflightError: another learner holds it.
    """
    ends_s = time.monotonic() + _PATIENCE_S
    said = False
    while not (held := _try_to_hold(folder)):
        if held is None:
            logger.warning("%s has no locks: see to it that no other run uses it", folder)
            return
        if time.monotonic() > ends_s:
            raise PreflightError(
                f"run.folder: {folder} is in use by another learner; wait for its end, or choose another folder"
            )
        if not said:
            logger.warning("%s is in use by another learner; waiting up to %.0f s for its end", folder, _PATIENCE_S)
        said = True
        time.sleep(_LOOK_EVERY_S)


def is_in_use(folder: Path) -> bool:
    """Whether a learner holds the folder now."""
    if not (folder / _NAME).exists():
        return False
    held = _try_to_hold(folder)
    if held:
        os.close(held)
    return held == 0


def _try_to_hold(folder: Path) -> int | None:
    """The descriptor that holds it; 0 where another has it, None where nobody can."""
    try:
        descriptor = os.open(folder / _NAME, os.O_CREAT | os.O_RDWR, 0o600)
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
