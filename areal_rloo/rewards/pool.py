"""Rewards in worker processes that can be killed: a hang, a crash or an exception drops its own sample only.

    score(request, part) ─► an idle worker process ─► the worth of the part, or a RewardError with the reason

The deadline of a reward starts when a worker process starts to compute the reward; time in the queue does not count.
The pool kills a process at the deadline and replaces each dead process (`outage.py`), while the others go on scoring.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from functools import partial

import msgspec

from areal_rloo.errors import ArealRlooError, RewardError
from areal_rloo.rewards.outage import Outage, RestartPolicy, final
from areal_rloo.rewards.process import AnswerJob, Job, PartJob, Reply, WorkerProcess, crash
from areal_rloo.rewards.request import FinalAnswer, RewardRequest, WorkStatistics, Worth
from areal_rloo.waiting import cancel

_GRACE_S = 0.1  # for a reply to pass from the socket through the event loop


class RewardPool:
    """A few worker processes, each with its own scorer. Make and use the pool on one event loop."""

    def __init__(
        self,
        factory: str,
        argument: bytes,
        *,
        num_workers: int,
        deadline_s: float,
        memory_bytes: int = 8 * 2**30,
        restarts: RestartPolicy | None = None,
    ) -> None:
        """Start `num_workers` processes (see `WorkerProcess`). Each reward has `deadline_s` from its start in one."""
        self._deadline_s, self._policy = deadline_s, restarts or RestartPolicy()
        self._start_process = partial(WorkerProcess, factory, argument, memory_bytes=memory_bytes)
        self._restarts, self._busy_s = 0, 0.0
        self._ended: ArealRlooError | None = None
        self._outage = Outage(self._policy, num_workers)
        self._workers = {self._start_process() for _ in range(num_workers)}
        self._idle: deque[WorkerProcess] = deque()
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._running: set[asyncio.Task[Reply]] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(1)

    async def ready(self) -> None:
        """Wait until the pool can score.

        Raises:
            ConfigError: the factory cannot be imported, or raises.
        """
        await asyncio.gather(*(worker.ready(self._policy.ready_within_s) for worker in self._workers))
        for worker in self._workers:
            self._outage.served()
            self._offer(worker)

    async def score(self, request: RewardRequest, part: str) -> Worth:
        """Compute one part of a completion's reward.

        Raises:
            RewardError: the reward took too long, raised, crashed the process, or is no finite number; or no process
                could be started in time.
            StartError: no process can be started any more; the pool is unusable.
        """
        return (await self._run(PartJob(job_id=next(self._ids), request=request, part=part))).value(Worth)

    async def final_answer(self, request: RewardRequest) -> FinalAnswer:
        """Find the final answer of a completion; raises like `score`."""
        return (await self._run(AnswerJob(job_id=next(self._ids), request=request))).value(FinalAnswer)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(
            runner="processes",
            num_at_once=len(self._workers),
            num_queued=sum(not given.done() for given in self._waiting),
            busy_s=self._busy_s,
            restarts=self._restarts,
        )

    async def close(self) -> None:
        """Kill the processes; discard running rewards."""
        self._end(RewardError("reward_crash", "the pool was closed"))
        await cancel(self._replacing)
        await asyncio.gather(self._outage.close(), *(worker.end() for worker in self._workers))
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, job: Job) -> Reply:
        encoded = msgspec.msgpack.encode(job)  # may raise, so before a process is taken
        running = asyncio.create_task(
            self._run_on(await self._take(), job.job_id, encoded), name=f"reward {job.job_id}"
        )
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be cancelled
        return await asyncio.shield(running)  # a process computes on although its caller is cancelled

    async def _take(self) -> WorkerProcess:
        """Wait for an idle process."""
        while self._ended is None:
            given: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
            self._waiting.append(given)
            self._hand_out()
            try:
                worker = await self._outage.wait(given)
            except asyncio.CancelledError:
                if given.done() and not given.cancelled() and given.exception() is None:
                    self._offer(given.result())
                raise
            if not worker.died_idle():
                return worker
            self._replace(worker)
        raise self._ended

    def _offer(self, worker: WorkerProcess) -> None:
        self._idle.append(worker)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._idle and self._waiting:
            given = self._waiting.popleft()
            if not given.done():  # else the caller was cancelled
                given.set_result(self._idle.popleft())

    async def _run_on(self, worker: WorkerProcess, job_id: int, job: bytes) -> Reply:
        lost = True
        try:
            reply = await self._ask(worker, job_id, job)
            lost = reply.reason in ("reward_timeout", "reward_crash")
            return reply
        finally:
            if lost:
                self._replace(worker)
            else:
                self._offer(worker)

    async def _ask(self, worker: WorkerProcess, job_id: int, job: bytes) -> Reply:
        started_s = time.monotonic()
        worker.send(job)
        receiving = asyncio.create_task(_reply_to(job_id, worker), name=f"reply to reward {job_id}")
        try:
            await asyncio.wait([receiving], timeout=self._deadline_s)
            if not receiving.done():  # after a block of the event loop, a reply in time may still be in the socket
                await asyncio.wait([receiving], timeout=_GRACE_S)
            if receiving.done():
                return receiving.result()
            return Reply(reason="reward_timeout", detail=f"no reward within {self._deadline_s:g} s")
        except EOFError:
            return crash(await worker.end())
        finally:
            receiving.cancel()
            self._busy_s += time.monotonic() - started_s

    def _replace(self, worker: WorkerProcess) -> None:
        """Replace a process in the background: neither the lost reward nor other processes wait for the new process."""
        self._outage.lost()
        if self._ended is None:
            self._restarts += 1
            replacing = asyncio.create_task(self._replaced(worker), name="the start of a reward process")
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replacing.discard)

    async def _replaced(self, worker: WorkerProcess) -> None:
        try:
            await worker.end()
            self._workers.discard(worker)
            worker = await self._outage.replacement(self._start_process)
        except Exception as error:  # noqa: BLE001 - in this task nothing else could end the waits
            self._end(final(error))
        else:
            self._workers.add(worker)
            self._outage.served()
            self._offer(worker)

    def _end(self, error: ArealRlooError) -> None:
        """End all waits with an error, now and later."""
        self._ended = self._ended or error
        while self._waiting:
            given = self._waiting.popleft()
            if not given.done():
                given.set_exception(error)


async def _reply_to(job_id: int, worker: WorkerProcess) -> Reply:
    """Wait for the reply to a job; discard others, which a reward may have written after the end of an earlier job."""
    while (reply := await worker.receive()).job_id != job_id:
        pass
    return reply
