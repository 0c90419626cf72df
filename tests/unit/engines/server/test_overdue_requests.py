"""Requests that the server never answers: aborted, retried, failed by name, or the server is opened again."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.faulty_server import FakeSGLang, Faults, engine_on_faulty, fake_sample
from support.model_versions import model_of
from support.server_support import in_buckets, request

from areal_rloo.engines.server import ServerEngine, UpdateGroup
from areal_rloo.errors import GenerationError
from areal_rloo.trajectory import Completion

Scenario = Callable[[ServerEngine, FakeSGLang, Faults], Awaitable[None]]


def _play(folder: Path, scenario: Scenario, **options: float) -> None:
    layouts, _ = in_buckets(model_of(folder))
    fake = FakeSGLang()
    limits = {"request_timeout_s": 0.3, "health_timeout_s": 0.6, **options}

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            engine_on_faulty(folder, fake, timeout_s=5.0, **limits) as (engine, faults),
        ):
            group = UpdateGroup("127.0.0.1", 1, "group", 1, 2, "gloo", 5.0)
            await asyncio.wrap_future(engine.update_from_group(1, group, layouts, [fake_sample(1)]))
            await scenario(engine, fake, faults)

    asyncio.run(main())


def _submit(engine: ServerEngine, *names: str, max_new_tokens: int = 20) -> list[Future[Completion]]:
    return engine.submit([request(name, prompt=(1, 2), max_new_tokens=max_new_tokens) for name in names])


def test_a_lost_request_is_sent_again(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        fake.loses = 1
        for future in _submit(engine, "a", "b", "c"):
            assert len((await asyncio.wrap_future(future)).tokens) == 20
        assert engine.server_statistics().overdue >= 1, "on a busy machine, others are late, too"
        assert engine.server_statistics().restarts == 0

    _play(tiny_folders["qwen2"], scenario)


def test_a_request_that_is_lost_each_time_fails_by_name(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        fake.loses_prompt = (3, 4)
        (lost,) = engine.submit([request("lost", prompt=(3, 4))])
        number = 0
        while not lost.done():
            number += 1
            (other,) = _submit(engine, f"other{number}")
            await asyncio.wrap_future(other)
        with pytest.raises(GenerationError, match=r"request lost: no answer within 0\.3 s, not even to an abort"):
            lost.result()
        assert engine.server_statistics().restarts == 0

    _play(tiny_folders["qwen2"], scenario)


def test_a_slow_request_continues_from_its_tokens(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        fake.token_s = 0.05
        (slow,) = _submit(engine, "slow", max_new_tokens=30)
        assert len((await asyncio.wrap_future(slow)).tokens) == 30
        assert engine.server_statistics().overdue > 1
        assert fake.sampled < 60, "a segment starts with the tokens of the segments before"

    _play(tiny_folders["qwen2"], scenario)


def test_a_server_that_answers_nothing_is_opened_again(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        fake.paused = True  # /health and all other calls still work
        for future in _submit(engine, "a", "b"):
            assert len((await asyncio.wrap_future(future)).tokens) == 20
        assert engine.server_statistics().restarts == 1

    _play(tiny_folders["qwen2"], scenario)


def test_the_time_of_a_pause_does_not_count(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        futures = _submit(engine, "a", "b", max_new_tokens=40)
        await asyncio.sleep(0.02)
        faults.path, faults.fault, faults.left = "/weights_checker", "wait", 1
        layouts, _ = in_buckets(model_of(tiny_folders["qwen2"]))
        group = UpdateGroup("127.0.0.1", 1, "later", 1, 2, "gloo", 5.0)
        await asyncio.wrap_future(engine.update_from_group(2, group, layouts, [fake_sample(2)]))
        for future in futures:
            assert len((await asyncio.wrap_future(future)).tokens) == 40
        assert engine.server_statistics().overdue == 0

    _play(tiny_folders["qwen2"], scenario, request_timeout_s=1.0)
