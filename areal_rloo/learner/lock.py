"""One learner a run folder: two would write the same checkpoints and metrics, each its own."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from areal_rloo.errors import PreflightError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_PATIENCE_S = 10.0  # for the one before, which was told to end
_LOOK_EVERY_S = 0.1


def lock_run_folder(folder: Path) -> None:
    """Hold the folder until this process ends, however it ends. A file system without locks is taken as it is.

    Raises:
        PreflightError: another learner holds it.
    """
    descriptor = os.open(folder / ".learner-lock", os.O_CREAT | os.O_RDWR, 0o600)
    ends_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > ends_s:
                raise PreflightError(
                    f"run.folder: {folder} is in use by another learner; wait for its end, or choose another folder"
                ) from error
            time.sleep(_LOOK_EVERY_S)
        except OSError as error:
            logger.warning("%s has no locks (%s): see to it that no other run uses it", folder, error)
            return
