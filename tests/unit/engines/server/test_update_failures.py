"""Every call of an update fails in every way: tokens keep right tags, and the next update succeeds."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from support.faulty_server import (
    FAULTS,
    FIRST_TOKEN,
    FakeSGLang,
    FakeVLLM,
    Fault,
    Faults,
    engine_on_faulty,
    fake_sample,
)
from support.model_versions import model_of
from support.server_support import in_buckets, request

from areal_rloo.engines.server import BucketLayout, ServerEngine, UpdateGroup, supervision, updates
from areal_rloo.engines.sglang import weights as sglang_weights
from areal_rloo.engines.vllm import weights as vllm_weights
from areal_rloo.errors import EngineError

TIMEOUT_S = 0.6  # of each call of an update
CALLS = {  # the calls of an update of SGLang: path, and calls of this path before the failing call
    "leave": ("/destroy_weights_update_group", 0),
    "join": ("/init_weights_update_group", 0),
    "pause": ("/pause_generation", 0),
    "begin": ("/begin_weight_update", 0),
    "first bucket": ("/update_weights_from_distributed", 0),
    "last bucket": ("/update_weights_from_distributed", 2),
    "end": ("/end_weight_update", 0),
    "prove": ("/weights_checker", 0),
    "continue": ("/continue_generation", 0),
}
VLLM_CALLS = {
    "join": ("/collective_rpc", 0),
    "pause": ("/pause", 0),
    "first bucket": ("/collective_rpc", 1),
    "last bucket": ("/collective_rpc", 3),
    "name": ("/update_weight_version", 0),
    "prove": ("/collective_rpc", 4),
    "continue": ("/resume", 0),
}


async def _update(engine: ServerEngine, version: int, layouts: list[BucketLayout]) -> int:
    group = UpdateGroup("127.0.0.1", 1, f"group-{version}", 1, 2, "gloo", TIMEOUT_S)
    return await asyncio.wrap_future(engine.update_from_group(version, group, layouts, [fake_sample(version)]))


async def _update_at_last(engine: ServerEngine, versions: Iterator[int], layouts: list[BucketLayout]) -> int:
    """Update to the first version that succeeds: a busy machine needs more than a call's time now and then."""
    for version in versions:
        try:
            assert await _update(engine, version, layouts) == version
            return version
        except EngineError:
            await asyncio.sleep(0.1)
    raise AssertionError("no version is left")


async def _fail(
    engine: ServerEngine,
    faults: Faults,
    layouts: list[BucketLayout],
    fake: FakeSGLang,
    call: tuple[str, int],
    fault: Fault,
    times: int,
) -> None:
    async with asyncio.timeout(60):
        versions = itertools.count(1)
        await _update_at_last(engine, versions, layouts)
        options: Any = {"max_new_tokens": 40, "prompt": (1, 2)}
        futures = engine.submit([request(f"r{i}", **options) for i in range(4)])
        await asyncio.sleep(0.03)
        path, skip = call
        faults.path, faults.fault, faults.skip, faults.left = path, fault, skip, times
        faulty = next(versions)
        try:
            assert await _update(engine, faulty, layouts) == faulty
            assert fake.version == faulty, "a version is reported that the server does not hold"
        except EngineError:
            pass
        futures += engine.submit([request(f"s{i}", **options) for i in range(4)])
        await _update_at_last(engine, versions, layouts)
        for future in futures:
            completion = await asyncio.wrap_future(future)
            assert len(completion.tokens) == 40
            assert (completion.tokens - FIRST_TOKEN).tolist() == completion.versions.tolist()
        assert engine.statistics().policy_version == fake.version
        assert not fake.paused


@pytest.mark.parametrize("tagged", [True, False], ids=["tagged", "untagged"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("kind", "of_update"), [(FakeSGLang, CALLS), (FakeVLLM, VLLM_CALLS)], ids=["sglang", "vllm"])
def test_a_failed_call_of_an_update_gives_no_token_a_wrong_tag(
    kind: type[FakeSGLang],
    of_update: dict[str, tuple[str, int]],
    fault: Fault,
    tagged: bool,
    tiny_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_folders["qwen2"]
    layouts, _ = in_buckets(model_of(folder))
    # A server that only claims to pause cannot be noticed, and neither can a check that proves nothing be right.
    calls = set(of_update) - ({"pause", "prove", "continue"} if fault == "ignore" else set())
    cases = [(call, times, kind(tagged=tagged)) for call in calls for times in (1, 3)]

    async def main() -> None:
        async with AsyncExitStack() as opened:
            tries = []
            for call, times, fake in cases:
                served = engine_on_faulty(folder, fake, timeout_s=TIMEOUT_S)
                engine, faults = await opened.enter_async_context(served)
                tries.append(_fail(engine, faults, layouts, fake, of_update[call], fault, times))
            _shorten_timeouts(monkeypatch)  # a start must not fail: a busy machine may need longer for its calls
            outcomes = await asyncio.gather(*tries, return_exceptions=True)
        failures = {case[:2]: repr(found) for case, found in zip(cases, outcomes, strict=True) if found is not None}
        assert failures == {}

    asyncio.run(main())


def _shorten_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (updates, sglang_weights, vllm_weights, supervision):
        monkeypatch.setattr(module, "_CALL_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(supervision, "_CHECK_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(supervision, "_RESTART_BACKOFF_S", (0.1,))
