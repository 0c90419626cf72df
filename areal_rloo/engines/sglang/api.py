"""SGLang as a kind of server, and the calls of a connection; `areal_rloo.engines.server.api` documents both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from areal_rloo.engines import installed
from areal_rloo.engines.server.answers import Output
from areal_rloo.engines.server.api import Arguments, Pause, ServerPlan, UpdateMode
from areal_rloo.engines.server.client import ServerClient, ServerRefusedError
from areal_rloo.engines.server.flights import Flight
from areal_rloo.engines.sglang.capabilities import (
    Capabilities,
    ask_capabilities,
    check_capabilities,
    too_early,
)
from areal_rloo.engines.sglang.command import command_line, environment
from areal_rloo.engines.sglang.completions import body_of, read_output
from areal_rloo.engines.sglang.weights import SGLangWeights

_CACHE = {"tags": ["kv_cache"]}


@dataclass(frozen=True, slots=True)
class SGLang:
    """The kind of server; `capabilities` replace a question to the server."""

    capabilities: Capabilities | None = None
    package: ClassVar = installed.SGLANG
    harmless: ClassVar[tuple[str, ...]] = ("freeze_gc failed",)  # SGLang logs this at every start, before it listens

    def command(self, python: str, arguments: Arguments, plan: ServerPlan, *, port: int, config: Path) -> list[str]:
        start = [python, "-m", "sglang.launch_server", "--config", str(config)]
        return start + command_line(arguments, plan, port=port)

    def environment(self, plan: ServerPlan) -> Mapping[str, str | None]:
        return environment(plan)

    async def label(self, client: ServerClient, *, timeout_s: float) -> str:
        try:
            label = str((await client.get(self.package.label, timeout_s=timeout_s))["weight_version"])
        except ServerRefusedError as error:
            if error.status == 404:
                raise too_early(f"no endpoint {self.package.label}") from error
            raise
        await client.post("/continue_generation", timeout_s=timeout_s)
        return label

    async def began(self, client: ServerClient, *, timeout_s: float) -> None:
        """Do nothing: an option of the command names the weights."""

    async def connect(self, client: ServerClient, *, pause: Pause, timeout_s: float) -> SGLangApi:
        found = self.capabilities or await ask_capabilities(client, timeout_s=timeout_s)
        return SGLangApi(client, found, pause)


class SGLangApi:
    """The calls of a server."""

    def __init__(self, client: ServerClient, capabilities: Capabilities, pause: Pause) -> None:
        self.client = client
        self.capabilities = capabilities
        keeps_cache = pause == "in_place" and capabilities.weight_versions
        self.weights = SGLangWeights(client, capabilities, keeps_cache=keeps_cache)

    def check(self, *, key: str, plan: ServerPlan, pause: Pause) -> None:
        sizes = {"tensor_parallel": plan.tensor_parallel, "context_tokens": plan.context_tokens}
        check_capabilities(self.capabilities, key=key, pause=pause, **sizes)

    async def generate(
        self, flight: Flight, *, cache_name: str, sent_version: int, mode: UpdateMode, vocab_size: int
    ) -> Output:
        body = body_of(flight, self.capabilities, cache_name)
        answer = await self.client.ask("/generate", body, timeout_s=None)
        return read_output(
            answer,
            sent_version=sent_version,
            spans=self.capabilities.weight_versions,
            late_tokens=mode == "in_place" and self.capabilities.overlap,
            vocab_size=vocab_size,
        )

    async def abort(self, request_id: str, *, timeout_s: float) -> None:
        await self.client.post("/abort_request", {"rid": request_id}, timeout_s=timeout_s)

    async def pause(self, mode: UpdateMode, *, timeout_s: float) -> None:
        await self.client.post("/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    async def sleep(self, *, timeout_s: float) -> None:
        await self.pause("retract", timeout_s=timeout_s)  # also of a health check, which is a request of the server
        await self.client.post("/release_memory_occupation", _CACHE, timeout_s=timeout_s)

    async def wake(self, *, timeout_s: float) -> None:
        await self.client.post("/resume_memory_occupation", _CACHE, timeout_s=timeout_s)
        await self.resume(timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        await self.client.post("/continue_generation", timeout_s=timeout_s)
