"""The tokens so far of unfinished requests: called back from the server, and sent again."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.faulty_server import FIRST_TOKEN, FakeSGLang, Faults, engine_on_faulty, fake_sample
from support.model_versions import model_of
from support.server_support import in_buckets, request

from areal_rloo.engines.server import ServerEngine, UpdateGroup
from areal_rloo.errors import EngineError

Scenario = Callable[[ServerEngine, FakeSGLang, Faults], Awaitable[None]]


def _play(folder: Path, scenario: Scenario, *, tagged: bool = True) -> None:
    fake = FakeSGLang(tagged=tagged)

    async def main() -> None:
        async with asyncio.timeout(60), engine_on_faulty(folder, fake, timeout_s=5.0) as (engine, faults):
            await _update(engine, folder, 1)
            await scenario(engine, fake, faults)

    asyncio.run(main())


async def _update(engine: ServerEngine, folder: Path, version: int) -> None:
    layouts, _ = in_buckets(model_of(folder))
    group = UpdateGroup("127.0.0.1", 1, f"group{version}", 1, 2, "gloo", 5.0)
    await asyncio.wrap_future(engine.update_from_group(version, group, layouts, [fake_sample(version)]))


@pytest.mark.parametrize("tagged", [True, False], ids=["tagged", "untagged"])
def test_requests_continue_after_each_call_back(tiny_folders: dict[str, Path], tagged: bool) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        futures = engine.submit([request(str(i), prompt=(1, 2), max_new_tokens=60) for i in range(12)])  # 8 slots
        lengths = []
        for _ in range(3):
            await asyncio.sleep(0.03)
            begun = await asyncio.wrap_future(engine.unfinished())
            lengths.append(sum(len(completion.tokens) for completion in begun.values()))
            assert len(begun) <= 8, "a waiting request keeps its place behind those with tokens"
        for future in futures:
            completion = await asyncio.wrap_future(future)
            assert completion.tokens.tolist() == [FIRST_TOKEN + 1] * 60
        assert lengths == sorted(lengths)
        assert lengths[0] > 0
        assert fake.sampled == 12 * 60

    _play(tiny_folders["qwen2"], scenario, tagged=tagged)


def test_a_call_back_during_an_update_waits_for_its_end(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["qwen2"]

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        (future,) = engine.submit([request("a", prompt=(1, 2), max_new_tokens=60)])
        await asyncio.sleep(0.03)
        faults.path, faults.fault, faults.left = "/update_weights_from_distributed", "wait", 1
        _, begun = await asyncio.gather(_update(engine, folder, 2), asyncio.wrap_future(engine.unfinished()))
        assert set(begun["a"].versions.tolist()) <= {1, 2}
        completion = await asyncio.wrap_future(future)
        assert (completion.tokens - FIRST_TOKEN >= completion.versions).all(), "no tag is newer than the weights"
        assert completion.versions[-1] == 2
        assert engine.server_statistics().restarts == 0

    _play(folder, scenario)


def test_a_question_given_up_calls_nothing_back(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["qwen2"]

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        futures = engine.submit([request(str(i), prompt=(1, 2), max_new_tokens=60) for i in range(8)])
        await asyncio.sleep(0.03)
        faults.path, faults.fault, faults.left = "/update_weights_from_distributed", "wait", 1
        updating = asyncio.create_task(_update(engine, folder, 2))
        await asyncio.sleep(0.05)
        for _ in range(3):
            asyncio.wrap_future(engine.unfinished()).cancel()
        await updating
        await asyncio.wait([asyncio.wrap_future(future) for future in futures])
        assert engine.server_statistics().resumed == 0

    _play(folder, scenario)


def test_a_server_that_returns_nothing_costs_only_the_wait(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_rloo.engines.server.engine._CALL_BACK_TIMEOUT_S", 0.2)

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        fake.loses = 1
        _, other = engine.submit([request(name, prompt=(1, 2), max_new_tokens=60) for name in ("lost", "other")])
        await asyncio.sleep(0.03)
        begun = await asyncio.wrap_future(engine.unfinished())
        assert begun.keys() == {"other"}
        assert len((await asyncio.wrap_future(other)).tokens) == 60
        engine.abort(["lost"])

    _play(tiny_folders["qwen2"], scenario)


def test_a_request_begun_elsewhere_is_continued(tiny_folders: dict[str, Path]) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults) -> None:
        engine.submit([request("a", prompt=(1, 2), max_new_tokens=60)])
        await asyncio.sleep(0.05)
        begun = (await asyncio.wrap_future(engine.unfinished()))["a"]
        one = replace(request("b", prompt=(1, 2), max_new_tokens=len(begun.tokens) + 5), begun=begun, min_version=1)
        (future,) = engine.submit([one])
        completion = await asyncio.wrap_future(future)
        assert len(completion.tokens) == len(begun.tokens) + 5
        assert completion.behaviour_logprobs[: len(begun.tokens)].tobytes() == begun.behaviour_logprobs.tobytes()
        assert completion.finish_reason == "length"

    _play(tiny_folders["qwen2"], scenario)


def test_a_closed_engine_is_asked_in_vain(tiny_folders: dict[str, Path]) -> None:
    async def main() -> None:
        async with engine_on_faulty(tiny_folders["qwen2"], FakeSGLang(), timeout_s=5.0) as (engine, _):
            pass
        with pytest.raises(EngineError, match="closed"):
            engine.unfinished()

    asyncio.run(main())
