"""Write logs that read side by side: a line per record, in UTC, with the names of process and module."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from areal_rloo.errors import ArealRlooError, UserError

_ROOT = "areal_rloo"


def get_logger(name: str) -> logging.Logger:
    """Give the logger of a module; pass `__name__`."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def setup_logs(process_name: str, *, level: str, file: Path | None, to_stderr: bool = False) -> None:
    """Append this process's records to a file and, if asked, write them to standard error. Call once, at start."""
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process_name} %(module)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    root = logging.getLogger(_ROOT)
    root.setLevel(level.upper())
    root.propagate = False
    others = logging.getLogger("asyncio")  # logs the errors of callbacks, and of tasks that are never awaited
    for handler in list(root.handlers):
        root.removeHandler(handler)
        others.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.NullHandler()]  # without a handler, logging writes to stderr
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    if to_stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
        others.addHandler(handler)


def run_to_exit_code(run: Callable[[], int]) -> int:
    """Run a process. Write our own errors to the log, and a single line to stderr."""
    logger = get_logger(__name__)
    try:
        return run()
    except UserError as error:
        logger.error("%s", error)
        _tell(f"error: {error}")
        return error.exit_code
    except ArealRlooError as error:
        logger.exception("stopped by an error")
        _tell(f"error: {error}")
        return error.exit_code


def _tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - users read this line
    except OSError:  # a full disk must not change the exit code, neither here nor at the last flush
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
