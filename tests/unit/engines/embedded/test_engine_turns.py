"""The embedded engine in turns with a learner: no memory during a step, the same completions, the right versions."""

import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.model_versions import model_of
from support.requests_to_serve import (
    PROMPT,
    assert_agree,
    assert_same,
    learner_logprobs,
    mixed_requests,
    request,
    results,
    serving,
    wait_until,
)
from support.turn_takers import ToldLearner, told_learner

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.trajectory import Completion
from areal_rloo.turns import EngineTurn

LONG = [request(str(i), seed=i, max_new_tokens=400, prompt=PROMPT[: 3 + i]) for i in range(4)]
OPTIONS = {"context_tokens": 512, "num_slots": 4}


def _generates(engine: EmbeddedEngine, num: int = 1) -> None:
    """Wait for some more tokens."""
    before = engine.statistics().generated_tokens
    wait_until(lambda: engine.statistics().generated_tokens >= before + num)


def _many_turns(engine: EmbeddedEngine, learner: ToldLearner, futures: list[Future[Completion]]) -> list[Completion]:
    """Let the learner take turns until all futures are done."""
    while not all(future.done() for future in futures):
        assert learner.take() == 0
        before = engine.statistics()
        assert (before.num_running, before.num_waiting) == (0, sum(not future.done() for future in futures))
        learner.give()
        wait_until(
            lambda before=before: (
                engine.statistics().generated_tokens > before.generated_tokens
                or all(future.done() for future in futures)
            )
        )
    return results(futures)


@pytest.mark.parametrize(
    ("name", "steps_ahead", "pinned"), [("qwen2", 0, False), ("qwen3", 1, False), ("llama", 1, True)]
)
def test_turns_change_no_completion(
    name: str, steps_ahead: int, pinned: bool, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, requests = tiny_folders[name], mixed_requests(12, longest=230, pinned=pinned)
    options = {"num_slots": 8, "context_tokens": 512, "options": EmbeddedConfig(cache_tokens=2048)}
    with serving(folder, **options) as engine:
        alone = results(engine.submit(requests))
    with (
        told_learner(tmp_path) as learner,
        serving(folder, **options, steps_ahead=steps_ahead, turn=EngineTurn(tmp_path)) as engine,
    ):
        interrupted = _many_turns(engine, learner, engine.submit(requests))
        statistics = engine.statistics()
    assert statistics.turns_given >= 10
    assert statistics.num_preempted == 0, "counts only a lack of memory"
    assert statistics.generated_tokens == sum(len(completion.tokens) for completion in alone)
    assert_same(interrupted, alone)
    assert_agree(interrupted, learner_logprobs(folder, requests, interrupted), 1e-5)


def test_the_cache_has_no_memory_during_a_step(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    options = {**OPTIONS, "options": EmbeddedConfig(cache_tokens=500_000)}
    process = psutil.Process()
    with told_learner(tmp_path) as learner:
        assert learner.take() == 0
        before = process.memory_info().rss
        with serving(tiny_folders["qwen2"], **options, turn=EngineTurn(tmp_path)) as engine:
            cache_bytes = 2 * 2 * 500_000 * 2 * 16 * 4  # layers, keys and values, tokens, heads, numbers, bytes
            engine.submit(LONG)
            time.sleep(0.1)
            assert process.memory_info().rss - before < cache_bytes / 4
            for _ in range(3):
                learner.give()
                _generates(engine)
                assert process.memory_info().rss - before > 0.9 * cache_bytes  # torch frees other memory meanwhile
                assert learner.take() == 0
                assert process.memory_info().rss - before < cache_bytes / 4


def test_the_engine_answers_during_a_step_and_generates_nothing(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    with (
        told_learner(tmp_path) as learner,
        serving(tiny_folders["qwen2"], **OPTIONS, turn=EngineTurn(tmp_path)) as engine,
    ):
        futures = engine.submit(LONG)
        _generates(engine, 20)
        assert learner.take() == 0
        generated = engine.statistics().generated_tokens
        so_far = engine.unfinished().result(timeout=60)
        engine.abort(["0"])
        ended = futures[0].result(timeout=60)
        later = engine.submit([request("later")])
        weights = {name: p.detach() for name, p in model_of(tiny_folders["qwen2"]).named_parameters()}
        assert engine.load_weights(1, weights.items()).result(timeout=60) == 1
        time.sleep(0.1)
        assert sum(len(completion.tokens) for completion in so_far.values()) == generated
        assert engine.statistics().generated_tokens == generated
        assert (ended.finish_reason, ended.tokens.tolist()) == ("abort", so_far["0"].tokens.tolist())
        learner.give()
        assert results(later)[0].versions.tolist() == [1] * 20
        assert engine.statistics().turn_wait_s >= 0.1


def test_tokens_around_turns_and_updates_have_the_right_versions(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny_folders["qwen2"]
    models = {version: model_of(folder, factor=1.0 + 0.02 * version) for version in range(6)}
    with told_learner(tmp_path) as learner, serving(folder, **OPTIONS, turn=EngineTurn(tmp_path)) as engine:
        futures = engine.submit(LONG)
        for version in range(1, 6):
            _generates(engine, 40)
            assert learner.take() == 0
            weights = {name: p.detach() for name, p in models[version].named_parameters()}
            engine.load_weights(version, weights.items()).result(timeout=60)
            learner.give()
        completions = results(futures)
    for one, completion in zip(LONG, completions, strict=True):
        versions = completion.versions
        assert np.all(np.diff(versions) >= 0)
        assert set(versions.tolist()) == set(range(6))
        for version, model in models.items():  # the whole cache is of this version
            (expected,) = learner_logprobs(model, [one], [completion])
            of_version = versions == version
            np.testing.assert_allclose(
                completion.behaviour_logprobs[of_version], expected[of_version], rtol=0, atol=1e-5
            )


def test_an_idle_engine_gives_the_turn(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    with (
        told_learner(tmp_path, patience_s=5) as learner,
        serving(tiny_folders["qwen2"], turn=EngineTurn(tmp_path)) as engine,
    ):
        for index in range(3):
            results(engine.submit([request(str(index))]))
            assert learner.take() == 0
            learner.give()
        assert engine.statistics().turns_given == 3


def test_an_engine_closes_during_a_step_and_leaves_the_turns(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    with told_learner(tmp_path, patience_s=5) as learner:
        with serving(tiny_folders["qwen2"], **OPTIONS, turn=EngineTurn(tmp_path)) as engine:
            futures = engine.submit(LONG)
            _generates(engine, 20)
            assert learner.take() == 0
        assert {future.result(timeout=60).finish_reason for future in futures} == {"abort"}
        learner.give()
        with serving(tiny_folders["qwen2"], **OPTIONS, turn=EngineTurn(tmp_path)) as engine:
            engine.submit(LONG)
            _generates(engine, 20)
        assert learner.take() == 0, "a closed engine has no turn"


def test_a_failed_engine_leaves_the_turns(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        told_learner(tmp_path, patience_s=5) as learner,
        serving(tiny_folders["qwen2"], turn=EngineTurn(tmp_path)) as engine,
    ):
        monkeypatch.setattr(torch, "cat", None)  # breaks the next prefill
        (future,) = engine.submit([request("0")])
        assert future.exception(timeout=60) is not None
        monkeypatch.undo()
        assert learner.take() == 0
