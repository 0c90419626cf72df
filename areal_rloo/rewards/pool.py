"""Rewards in worker processes that can be killed: a hang, a crash or an exception costs its own sample and no other.

    score(request) ─► a free worker process ─► reward, or a RewardError that says why there is none

The deadline counts from the moment a worker begins, so however many wait, none is lost for waiting. A worker that hangs
or dies is replaced. Requests and rewards are msgpack over a pipe; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Literal

import msgspec

from areal_rloo.errors import ConfigError, RewardError

_START_S = 120.0  # a scorer may import a large library

FailureReason = Literal["reward_timeout", "reward_crash", "reward_error", "reward_not_finite", "reward_wrong_type"]


class RewardRequest(msgspec.Struct, frozen=True):
    """What a reward is made of: the text of a completion, how it ended, and the answer of its item.

    `purpose` is `train` or `eval`: which task's reward is asked for.
    """

    purpose: str
    completion: str
    answer: str
    finish_reason: str


class RewardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start. `dropped` counts completions without a reward by reason; `busy_s` is time spent scoring, summed
    over workers."""

    scored: int
    dropped: dict[str, int]
    restarts: int
    busy_s: float

    @property
    def failed(self) -> int:
        """Completions without a reward."""
        return sum(self.dropped.values())


class Reply(msgspec.Struct, frozen=True):
    """From a worker process: a reward, or the reason why there is none."""

    reward: float | None = None
    reason: FailureReason | None = None
    detail: str = ""


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
        self._scored = self._restarts = 0
        self._dropped: Counter[str] = Counter()
        self._busy_s = 0.0
        self._closing = False
        # All start at once, then each is waited for.
        self._workers = {_Worker(self._factory, self._argument) for _ in range(num_workers)}
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        for worker in self._workers:
            worker.wait_until_ready()
            self._idle.put(worker)

    async def score(self, request: RewardRequest) -> float:
        """The reward of one completion.

        Raises:
            RewardError: it took too long, raised, died, or was no finite number.
            ConfigError: a scorer that has to be made again cannot be; the pool is of no more use.
        """
        encoded = msgspec.msgpack.encode(request)
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, encoded)
        if reply.reason is not None:
            self._dropped[reply.reason] += 1
            raise RewardError(reply.reason, reply.detail)
        assert reply.reward is not None, "a reply has a reward or a reason"
        self._scored += 1
        return reply.reward

    def statistics(self) -> RewardStatistics:
        return RewardStatistics(
            scored=self._scored, dropped=dict(self._dropped), restarts=self._restarts, busy_s=self._busy_s
        )

    def close(self) -> None:
        """Kill the workers; what is being scored is lost."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()

    def _score(self, request: bytes) -> Reply:
        """On a thread of the pool; there are as many threads as workers, so one is always free."""
        worker = self._idle.get()
        started_s = time.monotonic()
        reply = worker.score(request, self._deadline_s)
        self._busy_s += time.monotonic() - started_s
        if reply.reason in ("reward_timeout", "reward_crash") and not self._closing:
            worker.kill()
            self._workers.discard(worker)
            self._restarts += 1
            worker = _Worker(self._factory, self._argument)
            self._workers.add(worker)
            worker.wait_until_ready()
        self._idle.put(worker)
        return reply


class _Worker:
    """This side of one worker process."""

    def __init__(self, factory: str, argument: bytes) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "areal_rloo.rewards", str(theirs.fileno()), factory]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection.send_bytes(argument)

    def wait_until_ready(self) -> None:
        reply = self._receive(_START_S)
        if reply.reason is not None:
            self.kill()
            raise ConfigError(reply.detail)

    def score(self, request: bytes, deadline_s: float) -> Reply:
        try:
            self._connection.send_bytes(request)
        except OSError:
            return Reply(reason="reward_crash", detail="its worker process was dead")
        return self._receive(deadline_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self, deadline_s: float) -> Reply:
        try:
            if not self._connection.poll(deadline_s):
                return Reply(reason="reward_timeout", detail=f"no reward within {deadline_s:g} s")
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Reply)
        except (EOFError, OSError):
            return Reply(reason="reward_crash", detail=f"its worker process ended with code {self._process.wait()}")
