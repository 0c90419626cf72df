"""Rewards in worker processes that can be killed: a hang, a crash or an exception costs its own sample and no other.

    score(request, part) ─► a free worker process ─► its worth, or a RewardError that says why there is none

The deadline counts from the moment a worker begins, so however many wait, none is lost for waiting. A worker that hangs
or dies is replaced.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from areal_rloo.errors import ConfigError
from areal_rloo.rewards.process import Job, Reply, WorkerProcess
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth


class RewardPool:
    """A few worker processes, each with a scorer of its own; `score` may be awaited by many at once."""

    def __init__(self, factory: str, argument: bytes, *, num_workers: int, deadline_s: float) -> None:
        """
        Args:
            factory: import path of a function that is called with `argument` in each worker and gives its scorer.
            argument: what the factory needs to know.
            num_workers: processes, so rewards at a time.
            deadline_s: of one reward, from when its worker begins.

        Raises:
            ConfigError: the factory cannot be imported, or raises.
        """
        self._deadline_s = deadline_s
        self._factory, self._argument = factory, argument
        self._lock = threading.Lock()  # of everything below that threads write
        self._restarts, self._busy_s = 0, 0.0
        self._closing = False
        self._broken: ConfigError | None = None
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        # All start at once, then each is waited for.
        self._workers = {WorkerProcess(factory, argument) for _ in range(num_workers)}
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        try:
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except ConfigError:
            self.close()
            raise

    async def score(self, request: RewardRequest, part: str | None) -> Worth:
        """One part of the reward of one completion; with None only its final answer.

        Raises:
            RewardError: it took too long, raised, died, or was no finite number.
            ConfigError: a scorer that has to be made again cannot be; the pool is of no more use.
        """
        job = msgspec.msgpack.encode(Job(job_id=0, request=request, part=part))
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, job)
        return reply.take()

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(restarts=self._restarts, busy_s=self._busy_s)

    def close(self) -> None:
        """Kill the workers; what is being scored is lost."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()

    def _score(self, job: bytes) -> Reply:
        """On a thread of the pool; there are as many threads as workers, so one is always free."""
        worker = self._idle.get()
        try:
            if worker.died_idle():
                worker = self._replacement(worker)
            reply = self._replied(worker, job)
            if reply.reason in ("reward_timeout", "reward_crash"):
                worker = self._replacement(worker)
            return reply
        finally:
            self._idle.put(worker)  # in any case, or the thread that comes next waits for ever

    def _replied(self, worker: WorkerProcess, job: bytes) -> Reply:
        started_s = time.monotonic()
        try:
            worker.send(job)
            reply = worker.receive(self._deadline_s)
        except (EOFError, OSError):
            return Reply(reason="reward_crash", detail=f"its worker process ended with code {worker.end()}")
        finally:
            with self._lock:
                self._busy_s += time.monotonic() - started_s
        return reply or Reply(reason="reward_timeout", detail=f"no reward within {self._deadline_s:g} s")

    def _replacement(self, worker: WorkerProcess) -> WorkerProcess:
        worker.end()
        with self._lock:
            if self._closing:
                return worker
            if self._broken is not None:
                raise self._broken
            self._workers.discard(worker)
            worker = WorkerProcess(self._factory, self._argument)
            self._workers.add(worker)
            self._restarts += 1
        try:
            worker.wait_until_ready()
        except ConfigError as error:
            if not self._closing:
                self._broken = error
                raise
        return worker
