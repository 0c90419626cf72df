"""Weight updates of a fake server, and an engine whose fake server fails for good."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
from support.model_versions import model_of
from support.server_support import CAPABILITIES, request
from support.told_server import FakeServer, engine_on_fake

from areal_rloo.config import ServerConfig
from areal_rloo.engines.server import ServerEngine
from areal_rloo.engines.server.api import Connection
from areal_rloo.engines.server.client import ServerClient
from areal_rloo.engines.server.flights import FlightQueue
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.engines.server.updates import Load, Swapping, Update
from areal_rloo.engines.sglang.api import SGLangApi
from areal_rloo.errors import EngineError
from areal_rloo.waiting import cancel


def _play(folder: Path, scenario: Callable[[ServerEngine, FakeServer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), engine_on_fake(folder) as (engine, fake):
            await scenario(engine, fake)

    asyncio.run(main())


def test_a_cancelled_wait_does_not_cancel_the_update(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeServer) -> None:
        future = engine.load_weights(1, model_of(tiny_folders["qwen2"]).named_parameters())
        waiting = asyncio.ensure_future(asyncio.wrap_future(future))
        await fake.asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        fake.reads.set()
        assert await asyncio.wrap_future(future) == 1
        assert engine.statistics().policy_version == 1

    _play(tiny_folders["qwen2"], scenario)


def test_a_close_during_an_update_ends_although_the_server_is_gone(tiny_folders: dict[str, Path]) -> None:
    futures: list[Future[int]] = []

    async def scenario(engine: ServerEngine, fake: FakeServer) -> None:
        futures.append(engine.load_weights(1, model_of(tiny_folders["qwen2"]).named_parameters()))
        await fake.asked.wait()
        fake.hangs_up = True

    _play(tiny_folders["qwen2"], scenario)
    with pytest.raises(EngineError, match="the engine was closed"):
        futures[0].result(timeout=0)


def test_a_blocked_event_loop_is_no_failure_of_the_server(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeServer) -> None:
        fake.num_blocks = 3
        await fake.asked.wait()
        await asyncio.sleep(0.3)
        assert engine.server_statistics().restarts == 0
        assert engine.statistics().ready

    _play(tiny_folders["qwen2"], scenario)


@pytest.mark.parametrize("lands", [False, True])
def test_a_close_in_the_turn_in_which_a_request_lands_ends(lands: bool) -> None:
    class Client:
        async def post(self, path: str, body: object = None, *, timeout_s: float) -> None: ...

    async def main() -> None:
        state, queue = ServerState(policy_version=0), FlightQueue(num_slots=2, context_tokens=64, vocab_size=64)
        sending = Sending(state, queue, vocab_size=64, config=ServerConfig())
        swapping = Swapping(state, sending)
        capabilities = dataclasses.replace(CAPABILITIES, weight_versions=False)
        api = SGLangApi(cast(ServerClient, Client()), capabilities, "in_place")
        state.connection = Connection(api, "0", "abort")
        state.connected.set()
        running = asyncio.create_task(swapping.run())
        queue.submit([request("a")])
        (flight,) = queue.take(0)

        async def load() -> None: ...

        async def prepare(connection: Connection) -> Load:
            return load

        swapping.stage(Update(1, in_group=False, timeout_s=30.0, prepare=prepare))
        for _ in range(100):  # turns of the loop until the update waits for the flight
            await asyncio.sleep(0)
        assert state.paused
        if lands:
            queue.end(flight, "abort")
            state.landed.set()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await cancel([running])

    asyncio.run(main())


def test_a_server_that_fails_for_good_fails_every_request(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> str | None:
        raise EngineError("gave up after 3 restarts")

    async def scenario(engine: ServerEngine, fake: FakeServer) -> None:
        fake.reads.set()
        await asyncio.wrap_future(engine.load_weights(1, model_of(tiny_folders["qwen2"]).named_parameters()))
        fake.asked.clear()
        futures = engine.submit([request("sent"), request("waits", min_version=2)])
        await fake.asked.wait()
        monkeypatch.setattr(engine._server, "ended", ended)
        for future in futures:
            with pytest.raises(EngineError, match="the engine stopped: gave up after 3 restarts"):
                await asyncio.wrap_future(future)
        with pytest.raises(EngineError, match="the engine stopped"):
            engine.submit([request("later")])
        with pytest.raises(EngineError, match="the engine stopped"):
            engine.load_weights(2, [])

    _play(tiny_folders["qwen2"], scenario)
