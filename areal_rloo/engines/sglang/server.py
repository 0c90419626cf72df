"""The server behind an engine: one of our own, which we start and may kill, or one of somebody else, which we wait for.

`open` gives a connection to a server that answers, and is called again whenever that one has failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from areal_rloo.config import SGLangConfig
from areal_rloo.engines.sglang.capabilities import Capabilities, check_capabilities, too_early
from areal_rloo.engines.sglang.client import ServerClient, ServerGoneError, ServerRefusedError
from areal_rloo.engines.sglang.process import ServerPlan, ServerProcess, find_python
from areal_rloo.errors import ConfigError, EngineError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_POLL_S = 0.2
_CALL_TIMEOUT_S = 10.0
_WARN_EVERY_S = 30.0
_LONGEST_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class Connection:
    """A server that answered.

    Attributes:
        client: of it.
        capabilities: what it can do.
        label: what it calls its weights.
    """

    client: ServerClient
    capabilities: Capabilities
    label: str


class Server(Protocol):
    """Where connections come from."""

    managed: bool

    async def open(self) -> Connection:
        """Wait until it answers.

        Raises:
            ConfigError: it never will, and what to do about it.
            EngineError: it did not this time.
        """

    def ended(self) -> str | None:
        """Why its process is no more; None while it runs, or where that cannot be seen."""

    def kill(self) -> None:
        """End it, if it is ours to end."""


def make_server(
    config: SGLangConfig, url: str | None, plan: ServerPlan, log: Path, capabilities: Capabilities | None
) -> Server:
    """Somebody else's at `url`, or one of ours. What it can do is asked where `capabilities` is None."""
    if url is None:
        return ManagedServer(config, plan, log, capabilities)
    return ExternalServer(url, config, plan, capabilities)


def find_api_key(config: SGLangConfig) -> str | None:
    """The key of servers that are not ours; None where they have none.

    Raises:
        ConfigError: the environment does not have it.
    """
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"rollout.sglang.api_key_env: expected the servers' key in the environment variable {config.api_key_env}, "
            "got nothing; set it, or leave the option out for servers without a key"
        )
    return key


class ManagedServer:
    """Started by us. `open` must be called on the thread that lives as long as the server is to."""

    managed = True

    def __init__(self, config: SGLangConfig, plan: ServerPlan, log: Path, capabilities: Capabilities | None) -> None:
        self._config = config
        self._plan = plan
        self._log = log
        self._given = capabilities
        self._process: ServerProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self) -> Connection:
        connection = await self._start()
        if self._plan.radix_cache and self._config.pause == "in_place" and connection.capabilities.cache_key is None:
            logger.warning("this SGLang cannot keep the cache of two versions apart; starting it without radix cache")
            await connection.client.close()
            self._plan = replace(self._plan, radix_cache=False)
            connection = await self._start()
        return connection

    def ended(self) -> str | None:
        process = self._process
        if process is None or process.exit_code() is None:
            return None
        return f"the server ended with code {process.exit_code()}: {process.last_words()}; its log is {process.log}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def _start(self) -> Connection:
        self.kill()
        python = await asyncio.to_thread(find_python, self._config)
        process = self._process = ServerProcess(python, self._config, self._plan, self._log)
        logger.info("started a server (pid %d, port %d); its log is %s", process.pid, process.port, process.log)
        client = ServerClient(process.url, api_key=process.api_key)
        try:
            await self._until_healthy(client)
            process.forget_secrets()
            capabilities = self._given or await client.capabilities(timeout_s=_CALL_TIMEOUT_S)
            self._check(capabilities)
        except BaseException:
            await client.close()
            self.kill()
            raise
        return Connection(client, capabilities, "0")

    async def _until_healthy(self, client: ServerClient) -> None:
        ends_s = time.monotonic() + self._config.start_timeout_s
        while True:
            why = self.ended()
            if why is not None:
                raise ConfigError(f"rollout.sglang: {why}")
            try:
                await client.get_status("/health", timeout_s=_CALL_TIMEOUT_S)
                return
            except EngineError as error:
                if time.monotonic() > ends_s:
                    raise ConfigError(
                        f"rollout.sglang.start_timeout_s: the server was not ready within "
                        f"{self._config.start_timeout_s:g} s ({error}); its log is {self._log}"
                    ) from error
            await asyncio.sleep(_POLL_S)

    def _check(self, capabilities: Capabilities) -> None:
        check_capabilities(
            capabilities,
            key="rollout.sglang.arguments",
            tensor_parallel=self._plan.tensor_parallel,
            context_tokens=self._plan.context_tokens,
            pause="retract" if self._plan.radix_cache else self._config.pause,  # see open
        )


class ExternalServer:
    """Somebody else's. It is never killed; when it is gone, we wait for it."""

    managed = False

    def __init__(self, url: str, config: SGLangConfig, plan: ServerPlan, capabilities: Capabilities | None) -> None:
        self._url = url
        self._config = config
        self._plan = plan
        self._given = capabilities
        self._was_open = False

    async def open(self) -> Connection:
        client = ServerClient(self._url, api_key=find_api_key(self._config))
        try:
            label = await self._until_it_answers(client)
            capabilities = self._given or await client.capabilities(timeout_s=_CALL_TIMEOUT_S)
            check_capabilities(
                capabilities,
                key=f"rollout.sglang.urls: {self._url}",
                tensor_parallel=self._plan.tensor_parallel,
                context_tokens=self._plan.context_tokens,
                pause=self._config.pause,
            )
        except BaseException:
            await client.close()
            raise
        self._was_open = True
        return Connection(client, capabilities, label)

    def ended(self) -> str | None:
        return None

    def kill(self) -> None:
        pass

    async def _until_it_answers(self, client: ServerClient) -> str:
        """Its label, once it is healthy and not paused: whoever paused it may be gone."""
        started_s = warned_s = time.monotonic()
        backoff_s = _POLL_S
        while True:
            try:
                label = str((await client.get("/model_info", timeout_s=_CALL_TIMEOUT_S))["weight_version"])
                await client.post("/continue_generation", {}, timeout_s=_CALL_TIMEOUT_S)
                await client.get_status("/health", timeout_s=self._config.health_timeout_s)
                return label
            except ServerRefusedError as error:
                if error.status == 404:
                    raise too_early("of unknown version", "no endpoint /model_info") from error
                if error.status in (401, 403):
                    raise ConfigError(
                        f"rollout.sglang.api_key_env: {self._url} refuses the key ({error}); name the environment "
                        "variable that has the one it was started with"
                    ) from error
                trouble: Exception = error
            except (ServerGoneError, KeyError, TypeError) as error:
                trouble = error
            now_s = time.monotonic()
            if not self._was_open and now_s - started_s > self._config.start_timeout_s:
                raise ConfigError(
                    f"rollout.sglang.urls: {self._url} did not answer within rollout.sglang.start_timeout_s="
                    f"{self._config.start_timeout_s:g} s ({trouble}); start the server, or correct the url"
                )
            if now_s - warned_s > _WARN_EVERY_S:
                logger.warning("waiting for %s since %.0f s: %s", self._url, now_s - started_s, trouble)
                warned_s = now_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
