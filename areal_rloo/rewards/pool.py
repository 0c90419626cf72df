"""Rewards in worker processes that can be killed: a hang, a crash or an exception drops its own sample only.

    score(request, part) ─► an idle worker process ─► the worth of the part, or a RewardError with the reason

The deadline of a reward starts when a worker process starts to compute the reward; time in the queue does not count.
The pool kills a process at the deadline and replaces each dead process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial

import msgspec

from areal_rloo.errors import ConfigError
from areal_rloo.rewards.process import AnswerJob, Job, PartJob, Reply, WorkerProcess
from areal_rloo.rewards.request import FinalAnswer, RewardRequest, WorkStatistics, Worth

_GRACE_S = 0.1  # for a reply to pass from the socket through the event loop


class RewardPool:
    """A few worker processes, each with its own scorer. Make and use the pool on one event loop."""

    def __init__(self, factory: str, argument: bytes, *, num_workers: int, deadline_s: float) -> None:
        """Start `num_workers` processes (see `WorkerProcess`). Each reward has `deadline_s` from its start in one."""
        self._deadline_s = deadline_s
        self._start_process = partial(WorkerProcess, factory, argument)
        self._restarts, self._busy_s = 0, 0.0
        self._closing = False
        self._broken: ConfigError | None = None
        self._workers = {self._start_process() for _ in range(num_workers)}
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._running: set[asyncio.Task[Reply]] = set()
        self._ids = itertools.count(1)

    async def ready(self) -> None:
        """Wait until the pool can score.

        Raises:
            ConfigError: the factory cannot be imported, or raises.
        """
        await asyncio.gather(*(worker.ready() for worker in self._workers))
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, request: RewardRequest, part: str) -> Worth:
        """Compute one part of a completion's reward.

        Raises:
            RewardError: the reward took too long, raised, crashed the process, or is no finite number.
            ConfigError: the scorer cannot be made for a new process; the pool is unusable.
        """
        return (await self._run(PartJob(job_id=next(self._ids), request=request, part=part))).value(Worth)

    async def final_answer(self, request: RewardRequest) -> FinalAnswer:
        """Find the final answer of a completion; raises like `score`."""
        return (await self._run(AnswerJob(job_id=next(self._ids), request=request))).value(FinalAnswer)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(restarts=self._restarts, busy_s=self._busy_s)

    async def close(self) -> None:
        """Kill the processes; discard running rewards."""
        self._closing = True
        await asyncio.gather(*(worker.end() for worker in self._workers))
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, job: Job) -> Reply:
        encoded = msgspec.msgpack.encode(job)  # may raise, so before a process is taken
        running = asyncio.create_task(self._run_on(await self._idle.get(), job.job_id, encoded))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be cancelled
        return await asyncio.shield(running)  # a process computes on although its caller is cancelled

    async def _run_on(self, worker: WorkerProcess, job_id: int, job: bytes) -> Reply:
        try:
            if worker.died_idle():
                worker = await self._replacement(worker)
            reply = await self._ask(worker, job_id, job)
            if reply.reason in ("reward_timeout", "reward_crash"):
                worker = await self._replacement(worker)
            return reply
        finally:
            self._idle.put_nowait(worker)  # always: the next reward would wait forever

    async def _ask(self, worker: WorkerProcess, job_id: int, job: bytes) -> Reply:
        started_s = time.monotonic()
        worker.send(job)
        receiving = asyncio.create_task(_reply_to(job_id, worker))
        try:
            await asyncio.wait([receiving], timeout=self._deadline_s)
            if not receiving.done():  # after a block of the event loop, a reply in time may still be in the socket
                await asyncio.wait([receiving], timeout=_GRACE_S)
            if receiving.done():
                return receiving.result()
            return Reply(reason="reward_timeout", detail=f"no reward within {self._deadline_s:g} s")
        except EOFError:
            return Reply(reason="reward_crash", detail=f"its worker process ended with code {await worker.end()}")
        finally:
            receiving.cancel()
            self._busy_s += time.monotonic() - started_s

    async def _replacement(self, worker: WorkerProcess) -> WorkerProcess:
        await worker.end()
        if self._closing:
            return worker
        if self._broken is not None:
            raise self._broken
        self._workers.discard(worker)
        worker = self._start_process()
        self._workers.add(worker)
        self._restarts += 1
        try:
            await worker.ready()
        except ConfigError as error:
            if not self._closing:
                self._broken = error
                raise
        return worker


async def _reply_to(job_id: int, worker: WorkerProcess) -> Reply:
    """Wait for the reply to a job; discard others, which a reward may have written after the end of an earlier job."""
    while (reply := await worker.receive()).job_id != job_id:
        pass
    return reply
