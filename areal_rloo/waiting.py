"""Waits: for conditions without a notification, for calls without a timeout, for tasks that are cancelled, and for a
coroutine on an event loop that also runs the user's code."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LAST_S = 10.0  # for cancelled tasks and threads of the user's code to end


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

    _Call(target=run, name=name, daemon=True).start()
    return future


class _Call(threading.Thread):
    """The thread of a call without a timeout."""


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end, whatever the outcome."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def failed(task: asyncio.Task[Any]) -> bool:
    """Return True if a task has ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def fault_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return why a serving task ended; None if the owner has cancelled the task.

    A cancelled future also cancels the task awaiting the future, and a loop may return.
    """
    if task.cancelled():
        return None if task.cancelling() else RuntimeError(f"{task.get_name()} was cancelled from inside")
    return task.exception() or RuntimeError(f"{task.get_name()} ended without an error")


class ThreadPerCall(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread`: a daemon thread for each call.

    The threads of a pool are few, and Python waits for them at the end of the process. So a few hanging calls of the
    user's code would stop all later calls, and the process would not end.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return on_daemon_thread(partial(fn, *args, **kwargs), name="call")


def exit_despite_threads(code: int) -> NoReturn:
    """Exit, also if threads of the user's code never end, for which Python would wait."""
    timer = threading.Timer(_LAST_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    exit_despite_calls(code)


def exit_despite_calls(code: int) -> NoReturn:
    """Exit as `sys.exit` does, also while calls of `on_daemon_thread` hang.

    When a C++ library returns to a Python that frees everything, Python ends the thread. C++ forbids this and raises
    SIGABRT.
    """
    if not any(isinstance(thread, _Call) for thread in threading.enumerate()):
        sys.exit(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_beside_user_code(main: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Run a coroutine on a loop, as `asyncio.run` does, beside tasks of the user's code, which may do anything.

    A task or a callback that raises SystemExit or KeyboardInterrupt stops the loop of `asyncio.run`. Here the loop goes
    on: the awaiter of the task gets the exception. Ctrl-C still stops the loop, unless the loop handles SIGINT. At the
    end, tasks without an end are abandoned.
    """
    loop = loop or asyncio.new_event_loop()
    loop.set_default_executor(ThreadPerCall())
    task = loop.create_task(main, name="main")
    try:
        return _until_done(loop, task)
    finally:
        if others := asyncio.all_tasks(loop):
            for other in others:
                other.cancel()
            _until_done(loop, loop.create_task(_ended(others), name="the end of other tasks"))
        _until_done(loop, loop.create_task(loop.shutdown_asyncgens(), name="the end of generators"))
        loop.close()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=_LAST_S)


def stop_at_ctrl_c() -> None:
    """Let the next Ctrl-C cancel the current task of the main thread, and one after that interrupt as by default.

    A KeyboardInterrupt can fall into the user's code, which may take it for an error of its own and go on.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGINT, stop)


def _until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done() or (isinstance(error, KeyboardInterrupt) and _ctrl_c_interrupts()):
                raise


def _ctrl_c_interrupts() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt in this thread."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
