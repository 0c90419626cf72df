"""Replace dead worker processes: pauses between tries, a deadline for waiting jobs, and a last try.

At the start of a pool, the code of the user may be why a process fails (`WorkerProcess.ready`). Later the kernel may
have killed a new process for memory, or a file system may be slow. So a pool tries again, the other processes go on
scoring, and a job without a process in time drops its own sample. Used on the pool's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from areal_rloo.errors import ConfigError, RewardError, StartError, first_line
from areal_rloo.rewards.process import WorkerProcess
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a pool replaces processes. The default gives up after 10 tries for each process, in about 4 minutes."""

    ready_within_s: float = 120.0  # a scorer may import a large library
    first_pause_s: float = 1.0  # doubles after each failure
    longest_pause_s: float = 60.0
    most_failures: int = 10  # of each process in a row, while no process serves; then the worker ends
    served_within_s: float = 120.0  # for a job while no process serves; then the sample is dropped


class Outage:
    """Knows how many processes of a pool serve, and for how long none has."""

    def __init__(self, policy: RestartPolicy, num_processes: int) -> None:
        self._policy, self._most_failures = policy, policy.most_failures * num_processes
        self._num_serving = self._num_failures = 0
        self._since_s: float | None = None
        self._starting: set[WorkerProcess] = set()
        self._last_failure = "none was started"

    def served(self) -> None:
        """Count a process as serving."""
        self._num_serving += 1
        self._since_s, self._num_failures = None, 0

    def lost(self) -> None:
        """Count a process as lost."""
        self._num_serving -= 1
        if self._num_serving == 0:
            self._since_s = time.monotonic()

    async def replacement(self, start: Callable[[], WorkerProcess]) -> WorkerProcess:
        """Start a process, again and again until a process is ready.

        Raises:
            StartError: too many tries failed in a row, and no other process serves.
        """
        for failure in itertools.count():
            try:
                process = start()
                self._starting.add(process)
                await process.ready(self._policy.ready_within_s)
                self._starting.discard(process)
                return process
            except (ConfigError, StartError) as error:
                self._starting.discard(process)
                self._failed(error)
            except OSError as error:
                self._failed(error)
            await asyncio.sleep(min(self._policy.first_pause_s * 2**failure, self._policy.longest_pause_s))
        raise AssertionError("the count has no end")

    async def close(self) -> None:
        """End the processes of a cancelled `replacement`, which are no processes of the pool yet."""
        await asyncio.gather(*(process.end() for process in self._starting))

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Wait for the result of a process of the pool; cancel the future if the wait ends before.

        Raises:
            RewardError: no process has served for too long.
        """
        began_s, within_s = time.monotonic(), self._policy.served_within_s
        try:
            while not future.done():
                left_s = within_s
                if self._since_s is not None:
                    left_s -= time.monotonic() - max(began_s, self._since_s)
                if left_s <= 0:
                    detail = f"no reward process could be started within {within_s:g} s; the last: {self._last_failure}"
                    raise RewardError("reward_unavailable", detail)
                await asyncio.wait([future], timeout=left_s)
            return future.result()
        finally:
            future.cancel()

    def _failed(self, error: Exception) -> None:
        self._last_failure = first_line(error)
        logger.warning("a reward process could not be replaced: %s", self._last_failure)
        if self._num_serving > 0:
            return
        self._num_failures += 1
        if self._num_failures >= self._most_failures:
            raise StartError(
                f"rewards: no worker process could be started, {self._num_failures} times in a row; the last: "
                f"{self._last_failure}"
            ) from error


def final(error: Exception) -> StartError:
    """Return the last error of a pool: an unexpected error, too, is no mistake of the user."""
    return error if isinstance(error, StartError) else StartError(f"rewards: {type(error).__name__}: {error}")
