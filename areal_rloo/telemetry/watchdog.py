"""Find work without progress: an event loop standing still, an engine with requests and without tokens.

A daemon thread looks every second at all watched work. After half of the deadline, a line in the log names the work and
shows all stacks, once. After the whole deadline the process ends with exit code 1, if the work is essential, and the
launcher starts the process again. Other work is only reported.

False alarms are worse than hangs. Time counts by looks: after a stop (SIGSTOP, a suspended machine), or if this thread
gets no CPU, a long pause between two looks counts as two looks. Not covered: a call holding Python's lock forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import msgspec

from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.stacks import all_stacks

logger = get_logger(__name__)

_LOOK_EVERY_S = 1.0
_MOST_LOOKS = 2  # a longer pause between two looks counts as this many


class WatchdogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start."""

    metrics_prefix: ClassVar[str] = "watchdog_"

    hangs: Annotated[int, Metric("Times work did not move for too long", kind="counter", healthy=(0, 0))]


Read = Callable[[], object]
"""Returns a value, another with each progress, or None if there is no work. Called on the watchdog's thread: must
neither block nor raise."""


@dataclass(slots=True, eq=False)
class _Work:
    name: str
    read: Read
    deadline_s: float
    essential: bool
    value: object = None
    since_s: float = 0.0  # the value is the same
    reported: bool = False


class Watchdog:
    """The watched work of a process. The thread looks within a `with` block; call `watch` before the block."""

    def __init__(self, *, exit_process: Callable[[int], object] = os._exit) -> None:
        self._works: list[_Work] = []
        self._exit = exit_process
        self._num_hangs = 0
        self._awake_s = 0.0
        self._looked_s: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def watch(self, name: str, read: Read, deadline_s: float, *, essential: bool) -> None:
        """Watch work. If essential, the process ends when the work has not moved for `deadline_s`."""
        self._works.append(_Work(name, read, deadline_s, essential))

    def watch_loop(
        self, name: str, loop: asyncio.AbstractEventLoop, deadline_s: float, look: Read = lambda: None
    ) -> Read:
        """Watch an event loop, essential work. Returns a reader of the last result of `look`, called on the loop."""
        pulse = _Pulse(loop, look)
        self.watch(name, pulse.count, deadline_s, essential=True)
        return pulse.seen

    def statistics(self) -> WatchdogStatistics:
        return WatchdogStatistics(hangs=self._num_hangs)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def look(self, now_s: float) -> None:
        """Look at all work, at this time of a monotonic clock."""
        if self._looked_s is not None:
            self._awake_s += min(now_s - self._looked_s, _MOST_LOOKS * _LOOK_EVERY_S)
        self._looked_s = now_s
        for work in self._works:
            value = work.read()
            if value is None or value != work.value:
                if work.reported:
                    logger.warning("watchdog: %s moves again", work.name)
                work.value, work.since_s, work.reported = value, self._awake_s, False
            else:
                self._judge(work, self._awake_s - work.since_s)

    def _judge(self, work: _Work, still_s: float) -> None:
        if still_s >= work.deadline_s / 2 and not work.reported:
            work.reported = True
            self._num_hangs += 1
            then = f"the process ends after {work.deadline_s:g} s" if work.essential else "nothing is ended"
            logger.error("watchdog: %s has not moved for %.0f s (%s); %s", work.name, still_s, work.value, then)
            logger.error("watchdog: stacks:\n%s", all_stacks())
        if still_s >= work.deadline_s and work.essential:
            why = f"watchdog: {work.name} has not moved for {still_s:.0f} s; the launcher starts this process again"
            logger.error("%s", why)
            print(f"error: {why}", file=sys.stderr, flush=True)  # noqa: T201 - the launcher shows the last line
            self._exit(1)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look(time.monotonic())


class _Pulse:
    """Asks a loop to call back, again after each answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Read) -> None:
        self._loop, self._look = loop, look
        self._num_asked = self._num_answered = 0
        self._seen: object = None

    def count(self) -> int | None:
        """Return the number of answers; None if the loop is closed."""
        if self._num_answered == self._num_asked:
            self._num_asked += 1
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer)
        return None if self._loop.is_closed() else self._num_answered

    def seen(self) -> object:
        return self._seen

    def _answer(self) -> None:
        self._num_answered += 1
        self._seen = self._look()
