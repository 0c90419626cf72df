"""Sending requests to a fake server."""

import asyncio
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

NO_TOKEN: dict[str, Any] = {
    "output_ids": [],
    "meta_info": {"output_token_logprobs": [], "finish_reason": {"type": "abort"}, "weight_versions": []},
}


def test_a_request_without_a_token_fails_after_five_tries() -> None:
    asked: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append((await request.json())["rid"])
        return web.json_response(NO_TOKEN)

    async def scenario() -> tuple[BaseException | None, int]:
        app = web.Application()
        app.router.add_post("/generate", generate)
        async with TestServer(app) as server:
            client = ServerClient(str(server.make_url("")).rstrip("/"), api_key=None)
            connection = Connection(SGLangApi(client, CAPABILITIES, "in_place"), "0", "in_place")
            state = ServerState(connection=connection, policy_version=0)
            queue = FlightQueue(num_slots=2, context_tokens=64, vocab_size=100)
            sending = asyncio.create_task(Sending(state, queue, vocab_size=100, config=ServerConfig()).run())
            (future,) = queue.submit([GenerationRequest("a", (5, 6), SamplingParameters(max_new_tokens=10))])
            state.changed.set()
            await asyncio.wait([asyncio.wrap_future(future)])
            await asyncio.sleep(0.2)  # long enough for another try
            sending.cancel()
            await client.close()
            statistics = queue.statistics(ready=True, policy_version=0, weight_updates=0, swap_s=0.0)
            return future.exception(), statistics.num_waiting

    error, num_waiting = asyncio.run(scenario())
    assert isinstance(error, GenerationError)
    assert "request a: no token after 5 tries in a row" in str(error)
    assert num_waiting == 0
    assert len(asked) == 5
