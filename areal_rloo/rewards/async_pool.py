"""Async rewards: many run concurrently on the event loop of one worker process, which can be killed.

    score(request, part) ─► waiting ─► in flight (at most `num_at_once`) ─► worth, or a RewardError
                                            │ the process dies, or its event loop blocks
                                            ▼
                                         suspects: retried alone in a fresh process

Async rewards wait for a network, so a process for each would waste memory. The process itself enforces the deadline of
each reward, counted from the reward's start. Code that blocks the loop also blocks these deadlines: the pool then
misses a reply and kills the process. After a kill or a crash the guilty reward is unknown. So the pool retries every
running reward alone, and drops a reward that kills the process again.

All methods run on the caller's event loop, except on two threads: one thread starts processes and sends jobs; one
thread for each process receives replies.
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

_GRACE_S = 5.0  # after the deadline: tells a busy loop from a blocked loop


@dataclass(slots=True, eq=False)
class _Pending:
    """A job without a reply. `suspect`: to be retried alone."""

    job_id: int
    encoded: bytes
    reply: asyncio.Future[Reply]
    sent_s: float = 0.0
    suspect: bool = False
    timer: asyncio.TimerHandle | None = None


class AsyncRewardPool:
    """One worker process with an async scorer. Make and use the pool on one event loop."""

    def __init__(
        self, factory: str, argument: bytes, *, num_at_once: int, deadline_s: float, grace_s: float = _GRACE_S
    ) -> None:
        """Start the process (see `WorkerProcess`), for `num_at_once` rewards in flight.

        Each reward has `deadline_s` from its start. If no reply comes within `grace_s` more, the process is blocked.

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
        self._overdue: set[int] = set()  # jobs whose late reply made the pool kill the process
        self._broken: ConfigError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="async-reward")
        self._newest: WorkerProcess | None = None  # started, perhaps not ready
        self._process: WorkerProcess | None = None  # ready
        try:
            self._serve(self._thread.submit(self._started).result())
        except ConfigError:
            self._thread.shutdown()
            raise

    async def score(self, request: RewardRequest, part: str) -> Worth:
        """Compute one part of a completion's reward.

        Raises:
            RewardError: the reward took too long, raised, crashed the process, or is no finite number.
            ConfigError: the scorer cannot be made for a new process; the pool is unusable.
        """
        if self._broken is not None:
            raise self._broken
        job = Job(job_id=next(self._ids), request=request, part=part)
        pending = _Pending(job.job_id, msgspec.msgpack.encode(job), self._loop.create_future())
        self._waiting.append(pending)
        self._dispatch()
        return (await pending.reply).value(Worth)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(restarts=self._restarts, busy_s=self._busy_s)

    def close(self) -> None:
        """Kill the process; discard running rewards."""
        self._closing = True
        if self._newest is not None:
            self._newest.end()
        self._thread.shutdown(wait=False, cancel_futures=True)
        for pending in self._all_pending():
            self._settle(pending, Reply(reason="reward_crash", detail="the pool was closed"))

    def _serve(self, process: WorkerProcess) -> None:
        """Use a process that is ready. The receiving thread starts here, so `_on_lost` always comes later."""
        self._process = process
        threading.Thread(target=self._receive, args=(process,), name="async-reward-replies", daemon=True).start()
        self._dispatch()

    def _dispatch(self) -> None:
        """Send all jobs that may be sent: a suspect only if nothing is in flight, and nothing beside a suspect."""
        while self._process is not None:
            if self._suspects:
                if self._in_flight:
                    return
                pending = self._suspects.popleft()
            elif (
                self._waiting
                and len(self._in_flight) < self._num_at_once
                and not any(running.suspect for running in self._in_flight.values())
            ):
                pending = self._waiting.popleft()
            else:
                return
            if not pending.reply.done():  # a cancelled caller needs no reward
                self._send(pending, self._process)

    def _send(self, pending: _Pending, process: WorkerProcess) -> None:
        pending.sent_s = time.monotonic()
        pending.timer = self._loop.call_later(self._deadline_s + self._grace_s, self._on_overdue, pending, process)
        self._in_flight[pending.job_id] = pending
        self._loop.run_in_executor(self._thread, self._deliver, process, pending.encoded)

    def _on_overdue(self, pending: _Pending, process: WorkerProcess) -> None:
        self._overdue.add(pending.job_id)
        process.kill()  # the receiving thread then calls `_on_lost`

    def _on_reply(self, reply: Reply) -> None:
        pending = self._in_flight.pop(reply.job_id, None)
        if pending is not None:
            self._settle(pending, reply)
            self._dispatch()

    def _on_lost(self, code: int) -> None:
        """Handle the end of the process: drop the job that ran alone, or make all running jobs suspects; restart."""
        if self._closing:
            return
        self._process = None
        self._restarts += 1
        lost = list(self._in_flight.values())
        self._in_flight.clear()
        for pending in lost:
            if len(lost) == 1 and pending.job_id in self._overdue:
                detail = f"no reward within {self._deadline_s:g} s, and it blocked its event loop"
                self._settle(pending, Reply(reason="reward_timeout", detail=detail))
            elif len(lost) == 1 and not self._overdue:
                detail = f"its worker process ended with code {code}"
                self._settle(pending, Reply(reason="reward_crash", detail=detail))
            else:  # ran beside others, or the overdue reply came just before the kill
                self._stop_clock(pending)
                pending.suspect = True
                self._suspects.append(pending)
        self._overdue.clear()
        self._loop.run_in_executor(self._thread, self._started).add_done_callback(self._on_started)

    def _on_started(self, starting: asyncio.Future[WorkerProcess]) -> None:
        if self._closing or starting.cancelled():
            return
        if (error := starting.exception()) is None:
            self._serve(starting.result())
            return
        self._broken = error if isinstance(error, ConfigError) else ConfigError(f"rewards: {error}")
        for pending in self._all_pending():
            if not pending.reply.done():
                pending.reply.set_exception(self._broken)

    def _all_pending(self) -> list[_Pending]:
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
        """Start a process; runs on the sending thread."""
        process = WorkerProcess(self._factory, self._argument, async_deadline_s=self._deadline_s)
        self._newest = process
        if self._closing:
            process.end()
        process.wait_until_ready()
        return process

    def _deliver(self, process: WorkerProcess, encoded: bytes) -> None:
        """Send a job; runs on the sending thread."""
        with contextlib.suppress(OSError):  # the receiving thread reports a dead process
            process.send(encoded)

    def _receive(self, process: WorkerProcess) -> None:
        """Receive replies until the process is dead; runs on its own thread."""
        with contextlib.suppress(EOFError):
            while True:
                reply = process.receive(None)
                assert reply is not None, "a wait without a deadline ends with a reply"
                self._call_on_loop(self._on_reply, reply)
        self._call_on_loop(self._on_lost, process.end())

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for a reply
            self._loop.call_soon_threadsafe(function, *arguments)
