"""A fake server that a test tells what to do, and an engine connected to it on the test's event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer
from support.server_support import CAPABILITIES

from areal_rloo.config import ServerConfig
from areal_rloo.engines.server import ServerEngine, ServerPlan
from areal_rloo.engines.sglang import SGLang


class FakeServer:
    """Accepts every call and never finishes a completion. Reads weights only while `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.asked = asyncio.Event()
        self.hangs_up = False
        self.num_blocks = 0  # number of the next health checks that block the event loop
        self._weights = "default"

    async def answer(self, asked: web.Request) -> web.Response:
        if asked.path == "/generate":
            self.asked.set()
            await asyncio.Event().wait()
        if self.hangs_up:
            assert asked.transport is not None, "the connection is open"
            asked.transport.abort()
        if asked.path == "/health" and self.num_blocks > 0:
            self.num_blocks -= 1
            time.sleep(1.5)  # noqa: ASYNC251 - longer than the health timeout
            if self.num_blocks == 0:
                self.asked.set()
        if asked.path == "/update_weights_from_disk":
            self.asked.set()
            await self.reads.wait()
            self._weights = (await asked.json())["weight_version"]
        return web.json_response({"weight_version": self._weights})


@asynccontextmanager
async def engine_on_fake(folder: Path) -> AsyncIterator[tuple[ServerEngine, FakeServer]]:
    """An engine on this loop, connected to a fake external server."""
    fake, app = FakeServer(), web.Application()
    app.router.add_route("*", "/{path}", fake.answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        made = ServerEngine(
            SGLang(CAPABILITIES),
            ServerPlan(folder, "cpu", "float32", 1, 8, 64, 1),
            config=ServerConfig(urls=(url,), health_every_s=0.1, health_timeout_s=1.0),
            url=url,
            update_timeout_s=30.0,
            log=folder / "no.log",
        )
        async with made as engine:
            yield engine, fake
