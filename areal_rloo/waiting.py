"""Waits: for conditions without a notification, for calls without a timeout, and for tasks that are cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], bool],
    *,
    timeout_s: float,
    look_every_s: float,
    meanwhile: Callable[[float], None] = lambda waited_s: None,
    stops: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until the condition is true; give False if the wait ended before.

    Args:
        condition: called at once, then every `look_every_s`.
        meanwhile: called with the seconds waited so far after each call of a false condition.
        stops: ends the wait early if true.
    """
    started_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started_s
        if waited_s > timeout_s or stops():
            return False
        meanwhile(waited_s)
        time.sleep(look_every_s)
    return True


def call_within(timeout_s: float, call: Callable[[], T]) -> T:
    """Give the result of a call without a timeout, such as a name lookup.

    Raises:
        TimeoutError: the call did not return in time; the thread ends later.
        Exception: the exception of the call.
    """
    future = on_daemon_thread(call, name="call")
    if not wait([future], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return future.result()


def on_daemon_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """Call a function on a daemon thread: the process ends although the call hangs. The future cannot be cancelled.

    The thread itself frees the frames of a failed call, which may hold sockets, after it has set the error.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is read
            frames = error.__traceback__
            future.set_exception(error.with_traceback(None))
            del frames

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end, whatever the outcome."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
