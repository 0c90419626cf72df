"""vLLM as a kind of server, and the calls of a connection; `areal_rloo.engines.server.api` documents both."""

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
from areal_rloo.engines.vllm.capabilities import (
    Capabilities,
    ask_capabilities,
    check_capabilities,
    unfit,
)
from areal_rloo.engines.vllm.command import command_line, environment
from areal_rloo.engines.vllm.completions import body_of, read_output
from areal_rloo.engines.vllm.weights import VLLMWeights
from areal_rloo.errors import EngineError

_PREFIX = "generate-tokens-"  # vLLM puts this before the id of a request


@dataclass(frozen=True, slots=True)
class VLLM:
    """The kind of server; `capabilities` replace a question to the server."""

    capabilities: Capabilities | None = None
    package: ClassVar = installed.VLLM
    harmless: ClassVar[tuple[str, ...]] = ("WARNING", "EngineDeadError", "EngineCore encountered")

    def command(self, python: str, arguments: Arguments, plan: ServerPlan, *, port: int, config: Path) -> list[str]:
        start = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(plan.model_path), "--config", str(config)]
        return start + command_line(arguments, plan, port=port)

    def environment(self, plan: ServerPlan) -> Mapping[str, str | None]:
        return environment(plan)

    async def label(self, client: ServerClient, *, timeout_s: float) -> str:
        try:
            label = str((await client.get(self.package.label, timeout_s=timeout_s))["weight_version"])
        except ServerRefusedError as error:
            if error.status == 404:
                raise unfit(f"has no endpoint {self.package.label}", "start it with VLLM_SERVER_DEV_MODE=1") from error
            raise
        await client.post("/resume", timeout_s=timeout_s)
        return label

    async def began(self, client: ServerClient, *, timeout_s: float) -> None:
        await client.post("/update_weight_version", {"new_version": "0"}, timeout_s=timeout_s)

    async def connect(self, client: ServerClient, *, pause: Pause, timeout_s: float) -> VLLMApi:
        return VLLMApi(client, self.capabilities or await ask_capabilities(client, timeout_s=timeout_s))


class VLLMApi:
    """The calls of a server."""

    def __init__(self, client: ServerClient, capabilities: Capabilities) -> None:
        self.client = client
        self.capabilities = capabilities
        self.weights = VLLMWeights(client, capabilities)

    def check(self, *, key: str, plan: ServerPlan, pause: Pause) -> None:
        sizes = {"tensor_parallel": plan.tensor_parallel, "context_tokens": plan.context_tokens}
        check_capabilities(self.capabilities, key=key, **sizes)

    async def generate(
        self, flight: Flight, *, cache_name: str, sent_version: int, mode: UpdateMode, vocab_size: int
    ) -> Output:
        answer = await self.client.ask("/inference/v1/generate", body_of(flight, cache_name), timeout_s=None)
        spans = self.capabilities.weight_versions
        return read_output(answer, sent_version=sent_version, spans=spans, vocab_size=vocab_size)

    async def abort(self, request_id: str, *, timeout_s: float) -> None:
        body = {"request_ids": [_PREFIX + request_id]}
        await self.client.post("/inference/v1/abort_requests", body, timeout_s=timeout_s)

    async def pause(self, mode: UpdateMode, *, timeout_s: float) -> None:
        """Stop after the step under way, whose tokens arrive before the answer: no token is late."""
        await self.client.post("/pause?mode=keep&clear_cache=false", timeout_s=timeout_s)
        if mode != "in_place":
            path = "/reset_prefix_cache?reset_running_requests=true"
            answer = await self.client.ask(path, {}, timeout_s=timeout_s)
            if not answer.get("success"):
                raise EngineError(f"the server does not discard its cache: {answer}")

    async def sleep(self, *, timeout_s: float) -> None:
        """Free the weights as well, which vLLM keeps in memory of the host."""
        await self.client.post("/sleep?level=1&mode=abort", timeout_s=timeout_s)

    async def wake(self, *, timeout_s: float) -> None:
        await self.client.post("/wake_up", timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        await self.client.post("/resume", timeout_s=timeout_s)
