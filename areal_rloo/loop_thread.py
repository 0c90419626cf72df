"""An event loop on a thread of its own, and how other threads reach the objects on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import cancel

logger = get_logger(__name__)
T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread, and the only way for other threads to reach objects on the loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._handover = threading.Lock()  # held to hand over work, and to refuse all later work
        self._closed = False
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for the result.

        Raises:
            TimeoutError: there is no result yet; the coroutine goes on.
            RuntimeError: the loop is closed.
            CancelledError: the loop was closed meanwhile.
        """
        with self._handover:
            if self._closed:
                work.close()
                raise RuntimeError(f"the event loop {self._thread.name} is closed")
            result = asyncio.run_coroutine_threadsafe(work, self._loop)
        return result.result(timeout_s)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the loop and wait for the result."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop without waiting, or not at all on a closed loop; safe in a signal handler."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def begin(
        self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], object], *, name: str = ""
    ) -> None:
        """Start a task on the loop; `on_end` is called there with the ended task."""
        named = name or self._thread.name
        self.call(lambda: self._loop.create_task(work, name=named).add_done_callback(on_end))

    def _run_forever(self) -> None:
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # the task has kept the error; its owner reads the task
                logger.error("%s on the event loop %s", type(error).__name__, self._thread.name)

    def close(self) -> None:
        """Cancel all tasks of the loop, calls of other threads included, and end the thread."""
        with self._handover:
            self._closed = True
            cancelled = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        cancelled.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    await cancel(task for task in asyncio.all_tasks() if task is not asyncio.current_task())
