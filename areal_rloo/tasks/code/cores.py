"""Permission to use a core of this host, shared by all reward processes of this user.

Each reward process runs tests in parallel. Together they run at most as many programs as the host has cores, so a
program that waits for a core loses none of the time of its limits. The kernel frees the core of a dead process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator

from areal_rloo.files import SharedFolder

_LOOK_S = 0.005


class Cores:
    """The cores, as files with locks."""

    def __init__(self) -> None:
        """Join the folder with the locks.

        Raises:
            OSError: the folder cannot be made, or belongs to another user.
        """
        self.num = len(os.sched_getaffinity(0))
        self._folder = SharedFolder(f"cores-{os.getuid()}")

    @contextlib.asynccontextmanager
    async def core(self) -> AsyncIterator[None]:
        """Wait for a core, and keep it during the block."""
        while (taken := self._take()) is None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(_LOOK_S)
        try:
            yield
        finally:
            os.close(taken)

    def _take(self) -> int | None:
        for index in range(self.num):
            lock = self._folder.open(f"core-{index}")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                return lock
        return None
