"""A reward pool on an event loop of its own, for tests that call it from their thread and from loops of theirs."""

import asyncio
from typing import Any

from areal_rloo.errors import ConfigError
from areal_rloo.loop_thread import LoopThread
from areal_rloo.rewards.pool import RewardPool
from areal_rloo.rewards.request import RewardRequest, WorkStatistics, Worth


class PoolOnALoop:
    """A pool that is ready."""

    def __init__(self, factory: str, argument: bytes, **options: Any) -> None:
        self._loop = LoopThread("reward pool")
        self._pool = self._loop.call(lambda: RewardPool(factory, argument, **options))
        try:
            self._loop.run(self._pool.ready())
        except ConfigError:
            self.close()
            raise

    async def score(self, request: RewardRequest, part: str) -> Worth:
        return await asyncio.to_thread(self._loop.run, self._pool.score(request, part))

    def statistics(self) -> WorkStatistics:
        return self._loop.call(self._pool.statistics)

    def close(self) -> None:
        self._loop.run(self._pool.close())
        self._loop.close()
