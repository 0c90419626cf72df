"""The tokens so far of unfinished requests, which another engine continues."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.model_versions import model_of
from support.requests_to_serve import PROMPT, logprobs_by_version, request, results, serving, wait_until

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.engines.embedded.scheduler import Scheduler
from areal_rloo.errors import EngineError, GenerationError
from areal_rloo.trajectory import Completion

LONG = [request(str(i), seed=i, max_new_tokens=400, prompt=PROMPT[: 3 + i]) for i in range(4)]


def _so_far(engine: EmbeddedEngine, requests: Sequence[GenerationRequest], num: int) -> dict[str, Completion]:
    """Wait until each request that has a slot has some tokens, and take those of all."""
    engine.submit(requests)
    wait_until(lambda: engine.statistics().generated_tokens > num)
    return engine.unfinished().result()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_another_engine_continues_with_the_same_tokens(tiny_folders: dict[str, Path], steps_ahead: int) -> None:
    folder, options = tiny_folders["qwen2"], {"steps_ahead": steps_ahead, "context_tokens": 512}
    with serving(folder, **options) as engine:
        whole = results(engine.submit(LONG))
    with serving(folder, **options) as engine:
        begun = _so_far(engine, LONG, 60)
    assert begun.keys() == {one.request_id for one in LONG}
    with serving(folder, **options) as engine:
        continued = results(engine.submit([replace(one, begun=begun[one.request_id]) for one in LONG]))
        generated = engine.statistics().generated_tokens
    for one, expected, completion in zip(LONG, whole, continued, strict=True):
        num = len(begun[one.request_id].tokens)
        assert begun[one.request_id].finish_reason == "abort"
        assert completion.tokens.tolist() == expected.tokens.tolist()
        assert completion.behaviour_logprobs[:num].tobytes() == expected.behaviour_logprobs[:num].tobytes()
        np.testing.assert_allclose(completion.behaviour_logprobs, expected.behaviour_logprobs, atol=1e-5)
    assert generated == sum(400 - len(begun[one.request_id].tokens) for one in LONG)


def test_the_requests_go_on_as_if_nothing_had_been_asked(tiny_folders: dict[str, Path]) -> None:
    options = {"context_tokens": 512, "num_slots": 2}
    with serving(tiny_folders["qwen2"], **options) as engine:
        whole = results(engine.submit(LONG))
    with serving(tiny_folders["qwen2"], **options) as engine:
        futures = engine.submit(LONG)
        num_asked = 0
        while not all(future.done() for future in futures):
            begun = engine.unfinished().result()
            assert len(begun) <= 2, "a waiting request has no tokens"
            num_asked += 1
        assert num_asked > 10
        for expected, completion in zip(whole, results(futures), strict=True):
            assert completion.tokens.tolist() == expected.tokens.tolist()
            assert completion.behaviour_logprobs.tobytes() == expected.behaviour_logprobs.tobytes()
        assert engine.unfinished().result() == {}


def test_tokens_keep_the_versions_that_sampled_them(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["qwen2"]
    models = {version: model_of(folder, factor=1 + version / 100) for version in range(4)}
    one = replace(LONG[0], min_version=3)
    with serving(folder, context_tokens=512) as engine:
        engine.submit([LONG[0]])
        for version in (1, 2):
            made = engine.statistics().generated_tokens
            wait_until(lambda made=made: engine.statistics().generated_tokens > made + 5)
            engine.load_weights(version, models[version].named_parameters()).result()
        begun = engine.unfinished().result()["0"]
    with serving(folder, context_tokens=512) as engine:
        (future,) = engine.submit([replace(one, begun=begun)])
        engine.load_weights(3, models[3].named_parameters()).result()
        (completion,) = results([future])
    num = len(begun.tokens)
    assert set(begun.versions.tolist()) >= {0, 1}
    assert completion.versions.tolist() == [*begun.versions.tolist(), *[3] * (400 - num)]
    computed_again = structs.replace(
        completion, versions=np.full(400, 3, dtype=np.int32)
    )  # also the first tokens' cache
    expected = logprobs_by_version(models, one, computed_again)
    np.testing.assert_allclose(completion.behaviour_logprobs[num:], expected[num:], atol=1e-4)


def _begun(tokens: Sequence[int], version: int = 0) -> Completion:
    num = len(tokens)
    return Completion(
        np.array(tokens, np.int32), np.zeros(num, np.float32), np.full(num, version, dtype=np.int32), "abort"
    )


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        (_begun([1] * 400), "fewer than 400 tokens begun, got 400"),
        (_begun([10**6]), "begun: expected token ids"),
        (_begun([1], version=2), "begun under later weights than min_version 0"),
    ],
)
def test_tokens_that_cannot_begin_the_completion_are_refused(
    tiny_folders: dict[str, Path], begun: Completion, message: str
) -> None:
    with serving(tiny_folders["qwen2"], context_tokens=512) as engine:
        (future,) = engine.submit([replace(LONG[0], begun=begun)])
        with pytest.raises(GenerationError, match=message):
            future.result()


def test_a_closed_engine_is_asked_in_vain(tiny_folders: dict[str, Path]) -> None:
    with serving(tiny_folders["qwen2"]) as engine:
        pass
    with pytest.raises(EngineError, match="closed"):
        engine.unfinished()


def test_an_engine_that_dies_of_the_question_says_so(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Scheduler) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Scheduler, "so_far", broken)
    with serving(tiny_folders["qwen2"]) as engine, pytest.raises(EngineError, match="an illegal memory access"):
        engine.unfinished().result(timeout=60)
