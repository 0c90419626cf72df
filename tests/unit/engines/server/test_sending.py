"""Sending requests to a fake server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from support.server_support import CAPABILITIES

from areal_rloo.config import ServerConfig
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.server.api import Connection
from areal_rloo.engines.server.client import ServerClient
from areal_rloo.engines.server.flights import FlightQueue
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.engines.sglang.api import SGLangApi
from areal_rloo.errors import GenerationError
from areal_rloo.trajectory import Completion

NO_TOKEN: dict[str, Any] = {
    "output_ids": [],
    "meta_info": {"output_token_logprobs": [], "finish_reason": {"type": "abort"}, "weight_versions": []},
}


TOKEN: dict[str, Any] = {
    "output_ids": [7],
    "meta_info": {
        "output_token_logprobs": [[-0.5, 7, None]],
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "0", "start": 0, "end": 1}],
    },
}


@asynccontextmanager
async def _sending_to(
    generate: Callable[[web.Request], Awaitable[web.Response]],
) -> AsyncIterator[tuple[ServerState, FlightQueue]]:
    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server:
        client = ServerClient(str(server.make_url("")).rstrip("/"), api_key=None)
        connection = Connection(SGLangApi(client, CAPABILITIES, "in_place"), "0", "in_place")
        state = ServerState(connection=connection, policy_version=0)
        queue = FlightQueue(num_slots=2, context_tokens=64, vocab_size=100)
        sending = asyncio.create_task(Sending(state, queue, vocab_size=100, config=ServerConfig()).run())
        try:
            yield state, queue
        finally:
            sending.cancel()
            await client.close()


def test_a_failed_server_gets_no_request_before_a_health_check() -> None:
    """The API server of vLLM outlives the engine for a moment, and refuses every try."""
    asked: list[str] = []
    dead = True

    async def generate(request: web.Request) -> web.Response:
        asked.append((await request.json())["rid"])
        if dead:
            return web.json_response({"error": "EngineCore encountered an issue"}, status=500)
        return web.json_response(TOKEN)

    async def scenario() -> list[Completion]:
        nonlocal dead
        async with _sending_to(generate) as (state, queue):
            futures = queue.submit(
                [GenerationRequest(name, (5, 6), SamplingParameters(max_new_tokens=1)) for name in "ab"]
            )
            state.changed.set()
            await state.landed.wait()
            await asyncio.sleep(0.2)  # long enough for five tries
            assert state.suspicious
            assert len(asked) == 2
            dead, state.suspicious = False, False  # as a health check does
            state.changed.set()
            return [await asyncio.wrap_future(future) for future in futures]

    assert [completion.tokens.tolist() for completion in asyncio.run(scenario())] == [[7], [7]]


def test_a_request_without_a_token_fails_after_five_tries() -> None:
    asked: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append((await request.json())["rid"])
        return web.json_response(NO_TOKEN)

    async def scenario() -> tuple[BaseException | None, int]:
        async with _sending_to(generate) as (state, queue):
            (future,) = queue.submit([GenerationRequest("a", (5, 6), SamplingParameters(max_new_tokens=10))])
            state.changed.set()
            await asyncio.wait([asyncio.wrap_future(future)])
            await asyncio.sleep(0.2)  # long enough for another try
            statistics = queue.statistics(ready=True, policy_version=0, weight_updates=0, swap_s=0.0)
            return future.exception(), statistics.num_waiting

    error, num_waiting = asyncio.run(scenario())
    assert isinstance(error, GenerationError)
    assert "request a: no token after 5 tries in a row" in str(error)
    assert num_waiting == 0
    assert len(asked) == 5
