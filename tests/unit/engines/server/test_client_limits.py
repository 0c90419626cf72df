"""A server's answer without end, and a redirect, are refused."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_rloo.engines.server.client import ServerClient, ServerGoneError, ServerRefusedError


async def _without_end(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse()
    await stream.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(1024):
            await stream.write(bytes(2**20))
    return stream


async def _redirect(request: web.Request) -> web.StreamResponse:
    if request.path == "/elsewhere":
        return web.json_response({"text": "not by this server"})
    return web.Response(status=307, headers={"Location": "/elsewhere"})


def _run(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    scenario: Callable[[ServerClient], Awaitable[None]],
) -> None:
    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with TestServer(app) as server:
            client = ServerClient(str(server.make_url("/")), api_key="key")
            try:
                await scenario(client)
            finally:
                await client.close()

    asyncio.run(main())


def test_an_answer_without_end_is_as_good_as_none() -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerGoneError, match="/generate: the answer has more than 67108864 bytes"):
            await client.ask("/generate", {}, timeout_s=None)
        assert await asyncio.to_thread(client.metrics_text) == ""

    _run(_without_end, scenario)


def test_a_redirect_is_a_refusal() -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerRefusedError, match="HTTP 307"):
            await client.ask("/generate", {}, timeout_s=None)
        assert await asyncio.to_thread(client.metrics_text) == ""

    _run(_redirect, scenario)
