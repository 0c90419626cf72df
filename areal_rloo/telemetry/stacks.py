"""Show where a process stands: the stacks of all threads, and of all unfinished tasks of all event loops.

`kill -USR2 <pid>` writes both to the log of the process. The stacks of threads come at once, even if a call never
returns to Python. Those of tasks come as soon as the main thread executes Python again. Every program of the package
calls `show_on_signal` first. SIGUSR1 is taken: under Slurm, the signal drains.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_MOST_TASKS = 500  # a worker has a few tasks for each sample
_MOST_NAMES = 5  # of tasks with the same stack: a record of the log has a limited length
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def show_on_signal() -> None:
    """Write all stacks on SIGUSR2, and log the error of every thread that ends with an error. Call in main thread."""
    signal.signal(signal.SIGUSR2, _on_signal)
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)
    threading.excepthook = _log_thread_error


def all_stacks() -> str:
    """Format the stacks of all threads and tasks, by name."""
    return "\n".join([*_threads(), *_tasks()])


def _on_signal(number: int, frame: FrameType | None) -> None:
    # On a thread: the signal may have interrupted a write to the log.
    threading.Thread(target=lambda: logger.warning("stacks on a signal:\n%s", all_stacks()), name="stacks").start()


def _log_thread_error(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit or ended.exc_value is None:
        return
    name = "a thread" if ended.thread is None else f"the thread {ended.thread.name}"
    logger.error("%s ended with an error", name, exc_info=ended.exc_value)


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # no public function gives the frames of other threads
        if ident != threading.get_ident():
            yield f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"


def _tasks() -> Iterator[str]:
    # The garbage collector knows the tasks of every loop, those of the user's code, too. `isinstance` would ask each
    # object for its class, and an object may answer with a warning.
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # else the tasks from before are left out
    tasks = [item for item in gc.get_objects() if issubclass(type(item), asyncio.Task) and not item.done()]
    if is_frozen:
        gc.freeze()
    names: dict[str, list[str]] = {}  # by stack: most samples wait at the same place
    for task in tasks[:_MOST_TASKS]:
        names.setdefault("".join(_awaited(task.get_coro())).rstrip(), []).append(task.get_name())
    for stack, of_stack in names.items():
        more = f" and {len(of_stack) - _MOST_NAMES} more tasks" if len(of_stack) > _MOST_NAMES else ""
        yield f"task {', '.join(of_stack[:_MOST_NAMES])}{more}:\n{stack}"
    if len(tasks) > _MOST_TASKS:
        yield f"and {len(tasks) - _MOST_TASKS} more tasks"


def _awaited(awaitable: Any) -> Iterator[str]:
    """Yield the lines where a coroutine and each coroutine that it awaits stand, outermost first."""
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:  # futures and generators have none
        yield from traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
        awaitable = awaitable.cr_await
    if awaitable is not None:
        yield f"  awaits {_ADDRESS.sub('', repr(awaitable)):.200}\n"
