"""Weight updates of a fake server, and an engine whose fake server fails for good."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.model_versions import model_of
from support.sglang_support import FakeServer, engine_on_fake, request

from areal_rloo.engines.sglang import SGLangEngine
from areal_rloo.errors import EngineError


def _play(folder: Path, scenario: Callable[[SGLangEngine, FakeServer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), engine_on_fake(folder) as (engine, fake):
            await scenario(engine, fake)

    asyncio.run(main())


def test_a_cancelled_wait_does_not_cancel_the_update(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: SGLangEngine, fake: FakeServer) -> None:
        future = engine.load_weights(1, model_of(tiny_folders["qwen2"]).named_parameters())
        waiting = asyncio.ensure_future(asyncio.wrap_future(future))
        await fake.asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        fake.reads.set()
        assert await asyncio.wrap_future(future) == 1
        assert engine.statistics().policy_version == 1

    _play(tiny_folders["qwen2"], scenario)


def test_a_server_that_fails_for_good_fails_every_request(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: SGLangEngine, fake: FakeServer) -> None:
        fake.reads.set()
        await asyncio.wrap_future(engine.load_weights(1, model_of(tiny_folders["qwen2"]).named_parameters()))
        fake.asked.clear()
        futures = engine.submit([request("sent"), request("waits", min_version=2)])
        await fake.asked.wait()
        fake.refuses_the_key = True
        for future in futures:
            with pytest.raises(EngineError, match=r"the engine stopped: rollout\.sglang\.api_key_env: .* refuses"):
                await asyncio.wrap_future(future)
        with pytest.raises(EngineError, match="the engine stopped"):
            engine.submit([request("later")])
        with pytest.raises(EngineError, match="the engine stopped"):
            engine.load_weights(2, [])

    _play(tiny_folders["qwen2"], scenario)
