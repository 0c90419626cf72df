"""Faults on the calls of a server: before the call has an effect, or after. The server is real, or a fake one.

The fake server samples token 10 + v under the weights of version v, so each token shows the weights that sampled it.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.server_support import CAPABILITIES, VLLM_CAPABILITIES

from areal_rloo.config import ServerConfig
from areal_rloo.engines.server import ServerEngine, ServerKind, ServerPlan
from areal_rloo.engines.sglang import SGLang
from areal_rloo.engines.vllm import VLLM
from areal_rloo.models.fingerprint import Fingerprint, Sample
from areal_rloo.turns import EngineTurn

Fault = Literal["refuse", "break", "refuse after", "reset", "reset after", "hang", "hang after", "ignore", "wait"]
FAULTS: tuple[Fault, ...] = ("refuse", "break", "refuse after", "reset", "reset after", "hang", "hang after", "ignore")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FIRST_TOKEN = 10
NUM_BUCKETS = 3
_DIGESTED = "model.layers.0.mlp.down_proj.weight"
_MIXED = 99  # the version of partly loaded weights


@dataclass
class Faults:
    """The faults of the next calls of `path`, after `skip` calls without a fault; `left` faults remain.

    A call with the fault `wait` takes `wait_s`.
    """

    path: str = ""
    fault: Fault = "refuse"
    skip: int = 0
    left: int = 0
    wait_s: float = 2.0

    async def apply(self, asked: web.Request, handler: Handler) -> web.StreamResponse:
        strikes = asked.path == self.path and self.left > 0 and self.skip == 0
        if asked.path == self.path and self.left > 0:
            self.skip, self.left = max(0, self.skip - 1), self.left - strikes
        if not strikes or self.fault == "wait":
            await asyncio.sleep(self.wait_s if strikes else 0)
            return await handler(asked)
        if self.fault.endswith("after"):
            await handler(asked)
        return await self._wrong_answer(asked)

    async def _wrong_answer(self, asked: web.Request) -> web.StreamResponse:
        match self.fault.removesuffix(" after"):
            case "refuse":
                return web.json_response({"success": False, "message": "refused"}, status=400)
            case "break":
                return web.Response(status=500)
            case "ignore":
                return web.json_response({"success": True})
            case "hang":
                await asyncio.sleep(3600)
        assert asked.transport is not None, "the connection is open"
        asked.transport.abort()
        return web.Response()


@asynccontextmanager
async def faulty(handler: Handler) -> AsyncIterator[tuple[str, Faults]]:
    """Serve the calls of a handler, with faults; yields the URL."""
    faults, app = Faults(), web.Application()

    async def answer(asked: web.Request) -> web.StreamResponse:
        return await faults.apply(asked, handler)

    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app, shutdown_timeout=0.1) as server:
        yield str(server.make_url("")).rstrip("/"), faults


@asynccontextmanager
async def faulty_proxy(url: str, api_key: str) -> AsyncIterator[tuple[str, Faults]]:
    """Forward calls to a real server, with faults; yields the URL."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def forward(asked: web.Request) -> web.Response:
            async with session.request(asked.method, url + asked.path_qs, data=await asked.read()) as reply:
                content_type = reply.content_type
                return web.Response(body=await reply.read(), status=reply.status, content_type=content_type)

        async with faulty(forward) as faced:
            yield faced


def fake_sample(version: int) -> Sample:
    """Return the sample of a version of the fake server's weights."""
    return Sample("sha256", (Fingerprint((_DIGESTED,), (version,)),))


@dataclass
class FakeSGLang:
    """A server in memory: weights, label, pause, an update session, and requests under way."""

    tagged: bool = True
    version: int = 0  # of the weights
    label: str = "0"
    paused: bool = False
    asleep: bool = False
    disturbed: list[str] = field(default_factory=list)  # calls that a sleeping server does not survive
    session: bool = False
    token_s: float = 0.003
    sampled: int = 0
    loses: int = 0  # number of the next requests that are never answered
    loses_prompt: tuple[int, ...] | None = None  # requests with this prompt are never answered
    running: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)

    async def answer(self, asked: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await asked.json() if asked.method == "POST" and asked.can_read_body else {}
        self._look(asked.path)
        match asked.path:
            case "/generate":
                return web.json_response(await self._generate(body))
            case "/abort_request":
                self.aborted |= {rid for rid in self.running if rid.startswith(body["rid"])}
            case "/release_memory_occupation" | "/resume_memory_occupation":
                assert body == {"tags": ["kv_cache"]}
                self.asleep = asked.path == "/release_memory_occupation"
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/begin_weight_update" | "/end_weight_update":
                if self.session == (asked.path == "/begin_weight_update"):
                    return web.json_response({"message": "session"}, status=400)
                self.session = not self.session
            case "/update_weights_from_distributed" if not self.session:
                return web.json_response({"message": "no session"}, status=400)
            case "/update_weights_from_distributed":
                self.version = int(body["weight_version"]) if "weight_version" in body else _MIXED
                self.label = body.get("weight_version", self.label)
            case "/weights_checker":
                checksums = {_DIGESTED: f"{self.version:016x}"}
                return web.json_response({"ranks": [{"checksums": checksums, "parallelism_info": [{"tp_rank": 0}]}]})
        return web.json_response({"success": True, "weight_version": self.label})

    def _look(self, path: str) -> None:
        """Note a call that needs the memory of a sleeping server, or a call to sleep with requests under way."""
        harmless = (
            "/resume_memory_occupation",
            "/wake_up",
            "/abort_request",
            "/inference/v1/abort_requests",
            "/health",
        )
        if self.asleep and path not in harmless:
            self.disturbed.append(path)
        if self.running and path in ("/release_memory_occupation", "/sleep"):
            self.disturbed.append(f"{path} with {len(self.running)} requests")

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        rid, wanted = body["rid"], body["sampling_params"]["max_new_tokens"]
        if self.loses > 0 or tuple(body["input_ids"]) == self.loses_prompt:
            self.loses = max(0, self.loses - 1)
            await asyncio.sleep(3600)
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        self.running.add(rid)
        while len(tokens) < wanted and rid not in self.aborted:
            await asyncio.sleep(self.token_s)
            if self.paused:
                continue
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": len(tokens), "end": len(tokens)})
            self.sampled += 1
            tokens.append(FIRST_TOKEN + self.version)
            spans[-1]["end"] = len(tokens)
        self.running.discard(rid)
        meta: dict[str, Any] = {
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "finish_reason": {"type": "length" if len(tokens) == wanted else "abort"},
        }
        return {"output_ids": tokens, "meta_info": meta | ({"weight_versions": spans} if self.tagged else {})}


@dataclass
class FakeVLLM(FakeSGLang):
    """The same server with vLLM's calls. The name of the group tells the version that the buckets bring."""

    joined: int = 0
    num_received: int = 0

    async def answer(self, asked: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await asked.json() if asked.method == "POST" and asked.can_read_body else {}
        self._look(asked.path)
        match asked.path:
            case "/sleep" | "/wake_up":
                self.paused = self.asleep = asked.path == "/sleep"
            case "/inference/v1/generate":
                return web.json_response(await self._complete(body))
            case "/inference/v1/abort_requests":
                self.aborted |= {name.removeprefix("generate-tokens-") for name in body["request_ids"]}
            case "/pause" | "/resume":
                self.paused = asked.path == "/pause"
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/collective_rpc":
                return web.json_response({"results": [self._call(body["method"], body["kwargs"])]})
        return web.json_response({"success": True, "weight_version": self.label})

    def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        match method:
            case "areal_join":
                self.joined, self.num_received = int(arguments["name"].removeprefix("group-")), 0
            case "areal_receive":
                self.num_received += 1
                self.version = self.joined if self.num_received == NUM_BUCKETS else _MIXED
            case "areal_digests":
                return {_DIGESTED: f"{self.version:016x}"}
        return None

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_new_tokens": body["sampling_params"]["max_tokens"]}
        asked = {"rid": body["request_id"], "input_ids": body["token_ids"], "sampling_params": sampling}
        answer = await self._generate(asked)
        meta, tokens = answer["meta_info"], answer["output_ids"]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
            "finish_reason": meta["finish_reason"]["type"],
            "weight_versions": meta.get("weight_versions"),
        }
        usage = {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": {"cached_tokens": 0}}
        return {"choices": [choice], "usage": usage}


def _kind(fake: FakeSGLang) -> ServerKind:
    if isinstance(fake, FakeVLLM):
        return VLLM(dataclasses.replace(VLLM_CAPABILITIES, weight_versions=fake.tagged))
    return SGLang(dataclasses.replace(CAPABILITIES, digest="sha256", weight_versions=fake.tagged))


@asynccontextmanager
async def engine_on_faulty(
    folder: Path, fake: FakeSGLang, *, timeout_s: float, turn: EngineTurn | None = None, **options: Any
) -> AsyncIterator[tuple[ServerEngine, Faults]]:
    """An engine on a fake external server with faults."""
    async with faulty(fake.answer) as (url, faults):
        engine = ServerEngine(
            _kind(fake),
            ServerPlan(folder, "cpu", "float32", 1, 8, 64, 1),
            config=ServerConfig(urls=(url,), health_every_s=0.2, **{"health_timeout_s": 2.0, **options}),
            url=url,
            update_timeout_s=timeout_s,
            log=folder / "no.log",
            turn=turn,
        )
        async with engine:
            yield engine, faults
