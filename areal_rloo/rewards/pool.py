"""Rewards in worker processes that can be killed: a hang, a crash or an exception drops its own sample only.

    score(request, part) ─► an idle worker process ─► the worth of the part, or a RewardError with the reason

The deadline of a reward starts when a worker process starts to compute the reward; time in the queue does not count.
The pool kills a process at the deadline and replaces each dead process. A thread for each process does the waiting.
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
from areal_rloo.rewards.request import FinalAnswer, RewardRequest, WorkStatistics, Worth


class RewardPool:
    """A few worker processes, each with its own scorer. Many callers may await `score` at once."""

    def __init__(self, factory: str, argument: bytes, *, num_workers: int, deadline_s: float) -> None:
        """Start `num_workers` processes (see `WorkerProcess`); `deadline_s` counts from a reward's start in a process.

        Raises:
            ConfigError: the factory cannot be imported, or raises.
        """
        self._deadline_s = deadline_s
        self._factory, self._argument = factory, argument
        self._lock = threading.Lock()  # guards every field below that threads write
        self._restarts, self._busy_s = 0, 0.0
        self._closing = False
        self._broken: ConfigError | None = None
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._workers = {WorkerProcess(factory, argument) for _ in range(num_workers)}  # all start before any wait
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        try:
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except ConfigError:
            self.close()
            raise

    async def score(self, request: RewardRequest, part: str) -> Worth:
        """Compute one part of a completion's reward.

        Raises:
            RewardError: the reward took too long, raised, crashed the process, or is no finite number.
            ConfigError: the scorer cannot be made for a new process; the pool is unusable.
        """
        return (await self._run(Job(request=request, part=part))).value(Worth)

    async def final_answer(self, request: RewardRequest) -> FinalAnswer:
        """Find the final answer of a completion; raises like `score`."""
        return (await self._run(Job(request=request, part=None))).value(FinalAnswer)

    def statistics(self) -> WorkStatistics:
        return WorkStatistics(restarts=self._restarts, busy_s=self._busy_s)

    def close(self) -> None:
        """Kill the processes; discard running rewards."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()

    async def _run(self, job: Job) -> Reply:
        encoded = msgspec.msgpack.encode(job)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run_in_thread, encoded)

    def _run_in_thread(self, job: bytes) -> Reply:
        """Run a job. The pool has as many threads as processes, so a process is idle whenever a thread is."""
        worker = self._idle.get()
        try:
            if worker.died_idle():
                worker = self._replacement(worker)
            reply = self._ask(worker, job)
            if reply.reason in ("reward_timeout", "reward_crash"):
                worker = self._replacement(worker)
            return reply
        finally:
            self._idle.put(worker)  # always: the next thread would wait forever

    def _ask(self, worker: WorkerProcess, job: bytes) -> Reply:
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
