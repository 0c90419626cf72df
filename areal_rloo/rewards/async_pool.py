"""Async rewards: many run concurrently on the event loop of one worker process, which can be killed.

    score(request, part) ─► waiting ─► in flight (at most `num_at_once`) ─► worth, or a RewardError
                                            │ the process dies, or its event loop blocks
                                            ▼
                                         suspects: retried alone in a fresh process

Async rewards wait for a network, so a process for each would waste memory. The process itself enforces the deadline of
each reward, counted from the reward's start. Code that blocks its loop also blocks these deadlines: the pool then
misses a reply and kills the process. After a kill or a crash the guilty reward is unknown. So the pool retries every
running reward alone, and drops a reward that kills the process again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import msgspec

from areal_rloo.errors import ArealRlooError, RewardError
from areal_rloo.rewards.outage import Outage, RestartPolicy, final
from areal_rloo.rewards.process import PartJob, Reply, WorkerProcess, crash
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth
from areal_rloo.waiting import cancel

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
        self,
        factory: str,
        argument: bytes,
        *,
        num_at_once: int,
        deadline_s: float,
        memory_bytes: int = 8 * 2**30,
        grace_s: float = _GRACE_S,
        restarts: RestartPolicy | None = None,
    ) -> None:
        """Start the process (see `WorkerProcess`), for `num_at_once` rewards in flight.

        Each reward has `deadline_s` from its start. If no reply comes within `grace_s` more, the process is blocked.
        """
        self._start_process = partial(
            WorkerProcess, factory, argument, memory_bytes=memory_bytes, async_deadline_s=deadline_s
        )
        self._num_at_once, self._deadline_s, self._grace_s = num_at_once, deadline_s, grace_s
        self._ids = itertools.count()
        self._waiting: deque[_Pending] = deque()
        self._suspects: deque[_Pending] = deque()
        self._in_flight: dict[int, _Pending] = {}
        self._overdue: set[int] = set()  # jobs whose late reply made the pool kill the process
        self._restarts, self._busy_s = 0, 0.0
        self._ended: ArealRlooError | None = None
        self._policy = restarts or RestartPolicy()
        self._outage = Outage(self._policy, num_processes=1)
        self._process = self._start_process()
        self._is_ready = False
        self._serving: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until the pool can score.

        Raises:
            ConfigError: the factory cannot be imported, or raises.
        """
        await self._process.ready(self._policy.ready_within_s)
        self._serving = asyncio.create_task(self._serve(), name="replies of async rewards")

    async def score(self, request: RewardRequest, part: str) -> Worth:
        """Compute one part of a completion's reward.

        Raises:
            RewardError: the reward took too long, raised, crashed the process, or is no finite number; or no process
                could be started in time.
            StartError: no process can be started any more; the pool is unusable.
        """
        if self._ended is not None:
            raise self._ended
        job = PartJob(job_id=next(self._ids), request=request, part=part)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Pending(job.job_id, msgspec.msgpack.encode(job), reply))
        self._dispatch()
        return (await self._outage.wait(reply)).value(Worth)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(
            runner="async",
            num_at_once=self._num_at_once,
            num_queued=sum(not pending.reply.done() for pending in (*self._suspects, *self._waiting)),
            busy_s=self._busy_s,
            restarts=self._restarts,
        )

    async def close(self) -> None:
        """Kill the process; discard running rewards."""
        self._end(RewardError("reward_crash", "the pool was closed"))
        await cancel([self._serving] if self._serving is not None else [])
        await asyncio.gather(self._outage.close(), self._process.end())

    async def _serve(self) -> None:
        """Receive replies, and replace a dead process, until the pool is closed."""
        try:
            while True:
                self._outage.served()
                self._is_ready = True
                self._dispatch()
                with contextlib.suppress(EOFError):
                    while True:
                        self._on_reply(await self._process.receive())
                self._is_ready = False
                self._outage.lost()
                self._on_lost(await self._process.end())
                self._process = await self._outage.replacement(self._start_process)
        except Exception as error:  # noqa: BLE001 - in this task nothing else could end the waits
            self._end(final(error))

    def _end(self, error: ArealRlooError) -> None:
        """End all waits with an error, now and later."""
        self._ended, self._is_ready = self._ended or error, False
        for pending in (*self._in_flight.values(), *self._suspects, *self._waiting):
            self._stop_clock(pending)
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def _dispatch(self) -> None:
        """Send all jobs that may be sent: a suspect only if nothing is in flight, and nothing beside a suspect."""
        while self._is_ready:
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
                self._send(pending)

    def _send(self, pending: _Pending) -> None:
        pending.sent_s = time.monotonic()
        within_s = self._deadline_s + self._grace_s
        pending.timer = asyncio.get_running_loop().call_later(within_s, self._on_overdue, pending)
        self._in_flight[pending.job_id] = pending
        self._process.send(pending.encoded)

    def _on_overdue(self, pending: _Pending) -> None:
        self._overdue.add(pending.job_id)
        self._process.kill()  # `_serve` then calls `_on_lost`

    def _on_reply(self, reply: Reply) -> None:
        pending = self._in_flight.pop(reply.job_id, None)
        if pending is not None:
            self._settle(pending, reply)
            self._dispatch()

    def _on_lost(self, code: int | None) -> None:
        """Handle the end of the process: drop the job that ran alone, or make all running jobs suspects."""
        self._restarts += 1
        lost = list(self._in_flight.values())
        self._in_flight.clear()
        for pending in lost:
            if len(lost) == 1 and pending.job_id in self._overdue:
                detail = f"no reward within {self._deadline_s:g} s, and it blocked its event loop"
                self._settle(pending, Reply(reason="reward_timeout", detail=detail))
            elif len(lost) == 1 and not self._overdue:
                self._settle(pending, crash(code))
            else:  # ran beside others, or the overdue reply came just before the kill
                self._stop_clock(pending)
                pending.suspect = True
                self._suspects.append(pending)
        self._overdue.clear()

    def _settle(self, pending: _Pending, reply: Reply) -> None:
        self._stop_clock(pending)
        if not pending.reply.done():
            pending.reply.set_result(reply)

    def _stop_clock(self, pending: _Pending) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None
            self._busy_s += time.monotonic() - pending.sent_s
