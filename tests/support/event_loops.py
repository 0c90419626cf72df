"""Callbacks that block an event loop: a test fails if the loop's own work or a blocking call takes too long.

The time for which the thread only waited for a processor does not count: a busy machine takes the processor away from
any callback. Linux counts this time for each thread.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

LIMIT_S = 2.0
_WORTH_A_LOOK_S = 0.1


@dataclass
class BlockedLoops:
    """The callbacks of 0.1 s or longer.

    Attributes:
        limit_s: a callback that takes this long or longer is a failure; a test may set another limit.
        callbacks: seconds and description of each.
    """

    limit_s: float = LIMIT_S
    callbacks: list[tuple[float, str]] = field(default_factory=list)

    def check(self) -> None:
        """Raise AssertionError if a callback blocked a loop for `limit_s` or longer."""
        blocked = [f"{seconds:.1f} s: {text}" for seconds, text in self.callbacks if seconds >= self.limit_s]
        assert not blocked, f"blocked an event loop for {self.limit_s} s or longer: {blocked}"


@contextmanager
def watched_loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedLoops]:
    """Collect the long callbacks of all loops of this process."""
    blocked = BlockedLoops()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started_s, waited_s = time.monotonic(), _waited_s()
        run(handle)
        if (seconds := time.monotonic() - started_s) >= _WORTH_A_LOOK_S:
            blocked.callbacks.append((seconds - (_waited_s() - waited_s), repr(handle)))

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", timed)
        yield blocked


def _waited_s() -> float:
    """Return how long this thread has waited for a processor so far; 0.0 without Linux."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        _, waited_ns, _ = os.read(file, 100).split()
    finally:
        os.close(file)
    return 1e-9 * int(waited_ns)
