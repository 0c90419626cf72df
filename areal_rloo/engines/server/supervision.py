"""The server behind an engine: managed (we start and kill the process) or external (we wait for it).

`Supervision` opens a connection, notices a crash or a hang, and opens a connection again. A crash of a managed server
is noticed at once. A hanging server misses the deadline of an update call, or does not pass a health check for
`health_timeout_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path

from areal_rloo.config import ServerConfig
from areal_rloo.engines.base import UNKNOWN
from areal_rloo.engines.installed import find_api_key, find_python
from areal_rloo.engines.server.api import Connection, Pause, ServerApi, ServerKind, ServerPlan
from areal_rloo.engines.server.client import ServerClient, ServerGoneError, ServerRefusedError
from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.engines.server.readback import sample_of_files
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.errors import ArealRlooError, ConfigError, EngineError
from areal_rloo.keeper import was_killed
from areal_rloo.models.fingerprint import Digest, Sample, compared_share
from areal_rloo.models.folder import StoredTensor
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_POLL_S = 0.2
_CALL_TIMEOUT_S = 10.0
_CHECK_TIMEOUT_S = 60.0
_WARN_EVERY_S = 30.0
_MAX_BACKOFF_S = 5.0
_WATCH_EVERY_S = 0.1
_BLOCKED_S = 0.5  # a later wake-up than this is no fault of the server
_RESTART_BACKOFF_S = (0.0, 2.0, 5.0, 15.0)
_HEALTHY_PERIOD_S = 300.0  # after this time, earlier restarts are not counted


class _Server:
    """The common part."""

    def __init__(
        self, kind: ServerKind, config: ServerConfig, plan: ServerPlan, stored: Mapping[str, StoredTensor]
    ) -> None:
        self.health = kind.package.health
        self._kind = kind
        self._package = kind.package
        self._config = config
        self._plan = plan
        self._stored = stored

    def ended(self) -> str | None:
        """Return why the process ended; None while it runs, or if it is not ours."""
        return None

    def kill(self) -> None:
        """Kill our process, if there is one, and wait until it ends."""

    async def _connected(self, client: ServerClient, label: Awaitable[str], *, key: str, pause: Pause) -> Connection:
        """Await the label of the weights, which comes when the server is healthy, and check the server."""
        try:
            named = await label
            api = await self._kind.connect(client, pause=self._config.pause, timeout_s=_CHECK_TIMEOUT_S)
            api.check(key=key, plan=self._plan, pause=pause)
            digest = await self._usable_digest(api)
        except BaseException:
            try:
                await client.close()
            finally:
                await asyncio.to_thread(self.kill)
            raise
        mode = self._config.pause if api.capabilities.weight_versions else "abort"
        return Connection(api, named, mode, digest)

    async def _usable_digest(self, api: ServerApi) -> Digest | None:
        """Return the server's digest if known weights have the expected fingerprints; else later weights cannot be
        compared: the server has another device, or options that change the form of the weights.
        """
        found = api.capabilities
        if found.digest is None:
            why: str | None = f"{self._package.name} {found.version} with these options gives no digests that we know"
        else:
            sample, names = await asyncio.to_thread(self._known, found.digest)
            try:
                why = await api.weights.first_difference(sample, names, timeout_s=_CHECK_TIMEOUT_S)
            except ServerRefusedError as error:
                why = str(error)
        if why is not None:
            logger.warning("%s: updates cannot be proven: %s", api.client.url, why)
        elif (share := self._share()) < 1:
            logger.info("%s: proofs of updates compare %.1f %% of the parameters", api.client.url, 100 * share)
        return None if why is not None else found.digest

    def _share(self) -> float:
        """Return the share of the model's numbers in proofs."""
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        return compared_share(shapes, num_ranks=self._plan.tensor_parallel)

    def _known(self, digest: Digest) -> tuple[Sample, list[str]]:
        """Return a sample of weights that the server certainly holds, and the names of all parameters."""
        return Sample(digest, ()), [""]  # of no parameter: the empty name leaves out all


class ManagedServer(_Server):
    """A server that we start, on the event loop's thread: the keeper kills the server when this thread ends."""

    managed = True

    def __init__(
        self, kind: ServerKind, config: ServerConfig, plan: ServerPlan, stored: Mapping[str, StoredTensor], log: Path
    ) -> None:
        super().__init__(kind, config, plan, stored)
        self.first_version = 0 if plan.has_version else UNKNOWN
        self._log = log
        self._process: ServerProcess | None = None

    async def open(self) -> Connection:
        """Start the server, and wait until it answers.

        Raises:
            ConfigError: the server did not start; the message names a remedy.
            EngineError: the server was killed, or failed while answering.
        """
        connection = await self._start()
        separates = connection.api.capabilities.separates_prompts
        if self._plan.prefix_cache and self._config.pause == "in_place" and not separates:
            logger.warning("the server cannot separate the cached prompts of two versions; restart without this cache")
            try:
                await connection.api.client.close()
            finally:
                await asyncio.to_thread(self.kill)
            self._plan = replace(self._plan, prefix_cache=False)
            connection = await self._start()
        return connection

    def ended(self) -> str | None:
        process = self._process
        if process is None or process.exit_code() is None:
            return None
        return f"the server ended with code {process.exit_code()}: {process.last_words()}; its log is {process.log}"

    def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            self._process = None

    async def _start(self) -> Connection:
        python = await asyncio.to_thread(
            find_python, self._package, self._config, on_gpus=self._plan.device.startswith("cuda")
        )
        process = self._process = ServerProcess(self._kind, python, self._config, self._plan, self._log)
        logger.info("started a server (below pid %d, port %d); its log is %s", process.pid, process.port, process.log)
        client = ServerClient(process.url, api_key=process.api_key)
        pause: Pause = "retract" if self._plan.prefix_cache else self._config.pause  # `open` handles in_place
        label = self._until_healthy(process, client)
        try:
            return await self._connected(client, label, key=f"{self._package.key}.arguments", pause=pause)
        except EngineError as error:  # of the first request, for example: the model does not run on this device
            words = f"{error}; the server's last error: {process.last_words()}; its log is {process.log}"
            raise EngineError(words) from error

    def _known(self, digest: Digest) -> tuple[Sample, list[str]]:
        plan = self._plan
        sample = sample_of_files(self._stored, dtype=plan.dtype, digest=digest, num_ranks=plan.tensor_parallel)
        return sample, list(self._stored)

    async def _until_healthy(self, process: ServerProcess, client: ServerClient) -> str:
        ends_s = time.monotonic() + self._config.start_timeout_s
        while (why := self.ended()) is None:
            try:
                await client.text(self._package.health, timeout_s=_CALL_TIMEOUT_S)
                process.forget_secrets()
                await self._kind.began(client, timeout_s=_CALL_TIMEOUT_S)
                return "0"
            except EngineError as error:
                if time.monotonic() > ends_s:
                    raise ConfigError(
                        f"{self._package.key}.start_timeout_s: the server was not ready within "
                        f"{self._config.start_timeout_s:g} s ({error}); its log is {self._log}"
                    ) from error
            await asyncio.sleep(_POLL_S)
        text = f"{self._package.key}: {why}"
        raise EngineError(text) if was_killed(process.exit_code()) else ConfigError(text)


class ExternalServer(_Server):
    """A server that runs already; a failed server is awaited, never killed."""

    managed = False
    first_version = UNKNOWN

    def __init__(
        self, kind: ServerKind, config: ServerConfig, plan: ServerPlan, stored: Mapping[str, StoredTensor], url: str
    ) -> None:
        super().__init__(kind, config, plan, stored)
        self._url = url
        self._api_key: str | None = None
        self._was_open = False

    async def open(self) -> Connection:
        """Wait until the server answers; raises the errors of `ManagedServer.open`."""
        if not self._was_open:  # later, the variable is gone (rollout/engines.py)
            self._api_key = find_api_key(self._package, self._config)
        client = ServerClient(self._url, api_key=self._api_key)
        key, label = f"{self._package.key}.urls: {self._url}", self._until_it_answers(client)
        connection = await self._connected(client, label, key=key, pause=self._config.pause)
        self._was_open = True
        return connection

    async def _until_it_answers(self, client: ServerClient) -> str:
        """Return the label of the weights once the server is healthy. End a pause left by a former engine."""
        started_s = warned_s = time.monotonic()
        backoff_s = _POLL_S
        while True:
            try:
                label = await self._kind.label(client, timeout_s=_CALL_TIMEOUT_S)
                await client.text(self._package.health, timeout_s=self._config.health_timeout_s)
                return label
            except ServerRefusedError as error:
                if error.status in (401, 403) and not self._was_open:
                    raise ConfigError(
                        f"{self._package.key}.api_key_env: {self._url} refuses the key ({error}); name the environment "
                        "variable with the server's key"
                    ) from error
                trouble: Exception = error
            except ConfigError as error:
                if not self._was_open:
                    raise
                trouble = error
            except (ServerGoneError, KeyError, TypeError) as error:
                trouble = error
            now_s = time.monotonic()
            if not self._was_open and now_s - started_s > self._config.start_timeout_s:
                raise ConfigError(
                    f"{self._package.key}.urls: {self._url} did not answer within {self._package.key}.start_timeout_s="
                    f"{self._config.start_timeout_s:g} s ({trouble}); start the server, or correct the url"
                )
            if now_s - warned_s > _WARN_EVERY_S:
                logger.warning("waiting for %s since %.0f s: %s", self._url, now_s - started_s, trouble)
                warned_s = now_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


Server = ManagedServer | ExternalServer


class Supervision:
    """Supervises a server, on the engine's event loop."""

    def __init__(self, state: ServerState, server: Server, sending: Sending, config: ServerConfig) -> None:
        self._state = state
        self._server = server
        self._sending = sending
        self._config = config
        self._num_restarts = 0  # in a row

    async def start(self) -> Connection:
        """Open the first connection; raises the errors of `open`."""
        connection = await self._server.open()
        self._connect(connection)
        self._state.policy_version = self._server.first_version
        return connection

    async def run(self, connection: Connection) -> None:
        """Supervise until the server has failed for good.

        Raises:
            EngineError: a managed server crashed too often. An external server is awaited without a limit, also while a
                gateway refuses the key or the url, or while an unfit server has the url.
        """
        state = self._state
        while True:
            api = connection.api
            logger.info("ready: version %s at %s", api.capabilities.version, api.client.url)
            state.changed.set()
            opened_s = time.monotonic()
            why = await self._until_failed(api.client)
            logger.warning("%s", why)
            if time.monotonic() - opened_s > _HEALTHY_PERIOD_S:
                self._num_restarts = 0
            await self._disconnect(connection)
            connection = await self._reopen(why)
            before = state.policy_version  # an update that the failure interrupted has forgotten the version meanwhile
            state.restarts += 1
            self._connect(connection)
            if self._server.managed:
                state.now_has(self._server.first_version)
            elif before == UNKNOWN or connection.label != str(before):
                state.now_has(UNKNOWN)

    def _connect(self, connection: Connection) -> None:
        self._state.connection = connection
        self._state.suspicious = False
        self._state.hung = None
        self._state.connected.set()

    async def _disconnect(self, connection: Connection) -> None:
        self._state.connection = None
        self._state.connected.clear()
        self._state.num_discards += 1
        try:
            await asyncio.to_thread(self._server.kill)
            self._state.occupied = False
            await self._sending.take_back()
        finally:  # also if the engine is closed meanwhile
            await connection.api.client.close()

    async def _reopen(self, why: str) -> Connection:
        while True:
            if self._server.managed:
                if self._num_restarts >= self._config.max_server_restarts:
                    raise EngineError(f"gave up after {self._num_restarts} restarts of the server in a row: {why}")
                await asyncio.sleep(_RESTART_BACKOFF_S[min(self._num_restarts, len(_RESTART_BACKOFF_S) - 1)])
                self._num_restarts += 1
                await self._state.awake.wait()  # a start takes the memory that the learner has now
            self._state.occupied = True
            try:
                return await self._server.open()
            except ArealRlooError as error:
                self._state.occupied = False
                why = str(error)
                logger.warning("%s", why)
                if not self._server.managed:
                    await asyncio.sleep(_RESTART_BACKOFF_S[-1])

    async def _until_failed(self, client: ServerClient) -> str:
        state = self._state
        check: asyncio.Task[str | None] | None = None
        unhealthy_since_s: float | None = None
        asked_s = time.monotonic()
        next_check_s = asked_s + self._config.health_every_s
        try:
            while True:
                why = self._server.ended() or state.hung
                if why is not None:
                    return why
                now_s = time.monotonic()
                due = now_s >= (state.quiet_until_s if state.suspicious else next_check_s)
                if check is None and not state.updating and due:
                    check = asyncio.create_task(self._health_error(client), name="a health check")
                    asked_s = now_s
                    unhealthy_since_s = now_s if unhealthy_since_s is None else unhealthy_since_s
                elif check is not None and check.done():
                    trouble, check = check.result(), None
                    if trouble is None:
                        unhealthy_since_s = None
                        next_check_s = now_s + self._config.health_every_s
                        if asked_s >= state.quiet_until_s:  # else a refusal came after this check
                            state.suspicious = False
                        state.changed.set()
                    elif not state.updating:
                        state.health_failures += 1
                        logger.warning("not healthy: %s", trouble)
                if state.updating:
                    unhealthy_since_s = None
                if unhealthy_since_s is not None and now_s - unhealthy_since_s > self._config.health_timeout_s:
                    return f"the server was not healthy for {self._config.health_timeout_s:g} s"
                await asyncio.sleep(_WATCH_EVERY_S)
                late_s = time.monotonic() - now_s - _WATCH_EVERY_S
                if late_s > _BLOCKED_S and unhealthy_since_s is not None:  # the loop was blocked, and the check too
                    unhealthy_since_s += late_s
        finally:
            if check is not None:
                check.cancel()

    async def _health_error(self, client: ServerClient) -> str | None:
        try:
            await client.text(self._server.health, timeout_s=self._config.health_timeout_s)
        except EngineError as error:
            return str(error)
        return None
