"""Async rewards: many at a time on the event loop of one worker process, which can be killed.

    score(request, part) ─► waiting ─► in flight, so many at most ─► its worth, or a RewardError
                                            │ the process dies, or its loop stands still
                                            ▼
                                         suspects: tried again in a fresh process, one alone at a time

They wait for a network, so a process for each would be a waste. Each has its deadline from when it begins, kept by the
process itself. Where code blocks the loop nothing is kept there: this side notices that a reply is overdue and kills
the process. Which job is at fault in that, or in a crash, cannot be seen, so everything that was in flight is tried
again alone; what takes the process with it alone is dropped, and nothing else is.

Everything here runs on the caller's event loop but for two threads: one starts processes and sends to them, one for
each process receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from areal_rloo.errors import ConfigError
from areal_rloo.rewards.process import Job, Reply, WorkerProcess
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth

_GRACE_S = 5.0  # after the deadline, for a loop that is busy and not blocked


@dataclass(slots=True, eq=False)
class _Pending:
    """A job that somebody waits for."""

    job_id: int
    encoded: bytes
    reply: asyncio.Future[Reply]
    sent_s: float = 0.0
    overdue: bool = False
    suspect: bool = False
    timer: asyncio.TimerHandle | None = None


class AsyncRewardPool:
    """One worker process whose scorer is async. Made and used on one event loop."""

    def __init__(
        self, factory: str, argument: bytes, *, num_at_once: int, deadline_s: float, grace_s: float = _GRACE_S
    ) -> None:
        """
        Args:
            factory: import path of a function that is called with `argument` in the process and gives its scorer.
            argument: what the factory needs to know.
            num_at_once: rewards under way at a time.
            deadline_s: of one reward, from when it begins.
            grace_s: how long after its deadline a reply may come before the process counts as blocked.

        Raises:
            ConfigError: the factory cannot be imported, or raises.
        """
        self._factory, self._argument = factory, argument
        self._num_at_once, self._deadline_s, self._grace_s = num_at_once, deadline_s, grace_s
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._waiting: deque[_Pending] = deque()
        self._suspects: deque[_Pending] = deque()
        self._in_flight: dict[int, _Pending] = {}
        self._restarts, self._busy_s = 0, 0.0
        self._closing = False
        self._killed = False  # by this side, for want of a reply
        self._broken: ConfigError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="async-reward")
        self._newest: WorkerProcess | None = None  # started, perhaps not ready yet
        self._process: WorkerProcess | None = None  # serving
        try:
            self._serve(self._thread.submit(self._started).result())
        except ConfigError:
            self._thread.shutdown()
            raise

    async def score(self, request: RewardRequest, part: str | None) -> Worth:
        """One part of the reward of one completion.

        Raises:
            RewardError: it took too long, raised, took the process with it, or was no finite number.
            ConfigError: a scorer that has to be made again cannot be; the pool is of no more use.
        """
        if self._broken is not None:
            raise self._broken
        job_id = next(self._ids)
        encoded = msgspec.msgpack.encode(Job(job_id=job_id, request=request, part=part))
        pending = _Pending(job_id, encoded, self._loop.create_future())
        self._waiting.append(pending)
        self._dispatch()
        return (await pending.reply).take()

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(restarts=self._restarts, busy_s=self._busy_s)

    def close(self) -> None:
        """Kill the process; what is being scored is lost."""
        self._closing = True
        if self._newest is not None:
            self._newest.end()
        self._thread.shutdown(wait=False, cancel_futures=True)
        for pending in self._everybody():
            self._settle(pending, Reply(reason="reward_crash", detail="the pool was closed"))

    def _serve(self, process: WorkerProcess) -> None:
        """It is ready. What it tells comes after this, its end too."""
        self._process = process
        threading.Thread(target=self._receive, args=(process,), name="async-reward-replies", daemon=True).start()
        self._dispatch()

    def _dispatch(self) -> None:
        """Send what may be sent: a suspect when nothing else is in flight, and while there is one nothing beside it."""
        while self._process is not None:
            if self._suspects:
                if self._in_flight:
                    return
                pending = self._suspects.popleft()
            elif self._waiting and len(self._in_flight) < self._num_at_once and not self._alone():
                pending = self._waiting.popleft()
            else:
                return
            if not pending.reply.done():  # else nobody wants it any more
                self._send(pending, self._process)

    def _alone(self) -> bool:
        return any(pending.suspect for pending in self._in_flight.values())

    def _send(self, pending: _Pending, process: WorkerProcess) -> None:
        pending.sent_s = time.monotonic()
        pending.timer = self._loop.call_later(self._deadline_s + self._grace_s, self._blocked, pending, process)
        self._in_flight[pending.job_id] = pending
        self._loop.run_in_executor(self._thread, _sent, process, pending.encoded)

    def _blocked(self, pending: _Pending, process: WorkerProcess) -> None:
        pending.overdue = self._killed = True
        process.kill()  # the thread that receives tells `_on_lost`

    def _on_reply(self, reply: Reply) -> None:
        pending = self._in_flight.pop(reply.job_id, None)
        if pending is not None:
            self._settle(pending, reply)
            self._dispatch()

    def _on_lost(self, code: int) -> None:
        """The process is gone. Starts another one, and judges what was in flight."""
        if self._closing:
            return
        self._process = None
        self._restarts += 1
        lost = list(self._in_flight.values())
        self._in_flight.clear()
        for pending in lost:
            if len(lost) == 1 and pending.overdue:
                detail = f"no reward within {self._deadline_s:g} s, and it blocked its event loop"
                self._settle(pending, Reply(reason="reward_timeout", detail=detail))
            elif len(lost) == 1 and not self._killed:
                detail = f"its worker process ended with code {code}"
                self._settle(pending, Reply(reason="reward_crash", detail=detail))
            else:  # it was not alone, or what was overdue came at the last moment
                self._stop_clock(pending)
                pending.overdue, pending.suspect = False, True
                self._suspects.append(pending)
        self._killed = False
        starting = self._loop.run_in_executor(self._thread, self._started)
        starting.add_done_callback(self._on_started)

    def _on_started(self, starting: asyncio.Future[WorkerProcess]) -> None:
        if self._closing or starting.cancelled():
            return
        error = starting.exception()
        if error is None:
            self._serve(starting.result())
            return
        self._broken = error if isinstance(error, ConfigError) else ConfigError(f"rewards: {error}")
        for pending in self._everybody():
            if not pending.reply.done():
                pending.reply.set_exception(self._broken)

    def _everybody(self) -> list[_Pending]:
        return [*self._in_flight.values(), *self._suspects, *self._waiting]

    def _settle(self, pending: _Pending, reply: Reply) -> None:
        self._stop_clock(pending)
        if not pending.reply.done():
            pending.reply.set_result(reply)

    def _stop_clock(self, pending: _Pending) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None
            self._busy_s += time.monotonic() - pending.sent_s

    def _started(self) -> WorkerProcess:
        """On the thread that sends."""
        process = WorkerProcess(self._factory, self._argument, at_once_for_s=self._deadline_s)
        self._newest = process
        if self._closing:
            process.end()
        process.wait_until_ready()
        return process

    def _receive(self, process: WorkerProcess) -> None:
        """On a thread of its own, until the process is dead."""
        with contextlib.suppress(EOFError):
            while True:
                reply = process.receive(None)
                assert reply is not None, "a wait without an end ends with a reply"
                self._tell(self._on_reply, reply)
        self._tell(self._on_lost, process.end())

    def _tell(self, told: Callable[..., None], *what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(told, *what)


def _sent(process: WorkerProcess, encoded: bytes) -> None:
    with contextlib.suppress(OSError):  # dead; the thread that receives knows
        process.send(encoded)
