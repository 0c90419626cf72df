"""Waits, with a deadline, for conditions without a notification and for calls without a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

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
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again below
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([future], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return future.result()
