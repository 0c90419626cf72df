"""Ctrl-C while a launcher imports its modules. Runs on the main thread; imports only quick modules."""

from __future__ import annotations

import os
import signal
from types import FrameType

NOTHING_STARTED = "stopped before anything had started"


def end_on_interrupt() -> None:
    """End without a traceback on Ctrl-C. Call before the slow imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background of a script
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`: from now on there may be something to clean up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"{NOTHING_STARTED}\n".encode())
    finally:
        os._exit(128 + number)
