"""Keeps a server behind the engine: opens it, notices that it died or hangs, and opens it again.

Death is seen at once where the process is ours. A server that hangs misses the deadline of an update's call, or
gives no healthy answer for rollout.sglang.health_timeout_s.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from areal_rloo.config import SGLangConfig
from areal_rloo.engines.sglang.client import ServerClient
from areal_rloo.engines.sglang.sending import Sending
from areal_rloo.engines.sglang.server import Connection, Server
from areal_rloo.engines.sglang.state import UNKNOWN, ServerState
from areal_rloo.engines.sglang.updates import ServerUpdates
from areal_rloo.errors import ArealRlooError, ConfigError, EngineError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_POLL_S = 0.1
_BACKOFF_S = (0.0, 2.0, 5.0, 15.0)
_HEALTHY_PERIOD_S = 300.0  # after so long the restarts in a row are forgotten


class Supervision:
    """Of one server. Used on the engine's event loop."""

    def __init__(self, state: ServerState, server: Server, sending: Sending, config: SGLangConfig) -> None:
        self._state = state
        self._server = server
        self._sending = sending
        self._config = config
        self._in_a_row = 0

    async def run(self, ready: Future[None]) -> None:
        """Until there is no hope for it.

        Raises:
            ConfigError: it never was ready; says what to do.
            EngineError: it died too often.
        """
        connection = await self._server.open()
        self._connect(connection)
        self._state.policy_version = 0 if self._server.managed else UNKNOWN
        ready.set_result(None)
        while True:
            logger.info("ready: SGLang %s at %s", connection.capabilities.version, connection.client.url)
            self._state.changed.set()
            opened_s = time.monotonic()
            why = await self._until_failed(connection.client)
            logger.warning("%s", why)
            if time.monotonic() - opened_s > _HEALTHY_PERIOD_S:
                self._in_a_row = 0
            await self._disconnect(connection)
            before = self._state.policy_version
            connection = await self._reopen(why)
            self._state.restarts += 1
            self._connect(connection)
            if self._server.managed:
                self._state.now_has(0)
            elif before == UNKNOWN or connection.label != str(before):
                self._state.now_has(UNKNOWN)

    def _connect(self, connection: Connection) -> None:
        state = self._state
        state.connection = connection
        state.updates = ServerUpdates(connection.client, connection.capabilities, pause=self._config.pause)
        state.suspicious = False
        state.hung = None
        state.connected.set()

    async def _disconnect(self, connection: Connection) -> None:
        """Take everything back from a server that failed."""
        self._state.connection = self._state.updates = None
        self._state.connected.clear()
        self._state.epoch += 1
        await asyncio.to_thread(self._server.kill)
        await self._sending.take_back()
        await connection.client.close()

    async def _reopen(self, why: str) -> Connection:
        while True:
            if self._server.managed:
                if self._in_a_row >= self._config.max_server_restarts:
                    raise EngineError(f"gave up after {self._in_a_row} restarts of the server in a row: {why}")
                await asyncio.sleep(_BACKOFF_S[min(self._in_a_row, len(_BACKOFF_S) - 1)])
                self._in_a_row += 1
            try:
                return await self._server.open()
            except ArealRlooError as error:
                if isinstance(error, ConfigError) and not self._server.managed:
                    raise
                why = str(error)
                logger.warning("%s", why)
                if not self._server.managed:
                    await asyncio.sleep(_BACKOFF_S[-1])

    async def _until_failed(self, client: ServerClient) -> str:
        """Look on; says what happened to it."""
        state = self._state
        check: asyncio.Task[str | None] | None = None
        unhealthy_since_s: float | None = None
        next_check_s = time.monotonic() + self._config.health_every_s
        try:
            while True:
                why = self._server.ended() or state.hung
                if why is not None:
                    return why
                now_s = time.monotonic()
                if check is None and not state.updating and (state.suspicious or now_s >= next_check_s):
                    check = asyncio.create_task(self._trouble(client))
                    unhealthy_since_s = now_s if unhealthy_since_s is None else unhealthy_since_s
                elif check is not None and check.done():
                    trouble, check = check.result(), None
                    if trouble is None:
                        unhealthy_since_s = None
                        next_check_s = now_s + self._config.health_every_s
                        state.trust()
                    elif not state.updating:
                        state.health_failures += 1
                        logger.warning("not healthy: %s", trouble)
                if state.updating:
                    unhealthy_since_s = None
                if unhealthy_since_s is not None and now_s - unhealthy_since_s > self._config.health_timeout_s:
                    return f"the server was not healthy for {self._config.health_timeout_s:g} s"
                await asyncio.sleep(_POLL_S)
        finally:
            if check is not None:
                check.cancel()

    async def _trouble(self, client: ServerClient) -> str | None:
        """What is wrong with its health; None where nothing is."""
        try:
            await client.get_status("/health", timeout_s=self._config.health_timeout_s)
        except EngineError as error:
            return str(error)
        return None
