"""Swap weights while rows move and requests are preempted, kept, pinned and aborted."""

import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from support.model_versions import model_of
from support.requests_to_serve import PROMPT, logprobs_by_version, request, results, serving, wait_until
from transformers import PreTrainedModel

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.base import GenerationRequest
from areal_rloo.trajectory import Completion

NUM_VERSIONS = 4
Versions = dict[int, PreTrainedModel]


@pytest.fixture(scope="module")
def unequal(tiny_folders: dict[str, Path]) -> Versions:
    return {version: model_of(tiny_folders["qwen2"], factor=1.03**version) for version in range(NUM_VERSIONS)}


@pytest.fixture(scope="module")
def equal(tiny_folders: dict[str, Path]) -> Versions:
    return dict.fromkeys(range(NUM_VERSIONS), model_of(tiny_folders["qwen2"]))


def test_rows_continue_after_a_swap_evicts_a_kept_row(tiny_folders: dict[str, Path], unequal: Versions) -> None:
    one = request("runs on", prompt=(50, 51, 52), max_new_tokens=900, seed=3)
    with serving(tiny_folders["qwen2"], context_tokens=1024) as engine:
        results(engine.submit([request("kept", max_new_tokens=200)]))
        (future,) = engine.submit([one])
        wait_until(lambda: engine.statistics().decode_steps > 210)
        engine.load_weights(1, unequal[1].named_parameters()).result(timeout=60)
        (completion,) = results([future])
    assert set(completion.versions.tolist()) == {0, 1}
    np.testing.assert_allclose(completion.behaviour_logprobs, logprobs_by_version(unequal, one, completion), atol=1e-4)


def _random_requests(
    random: np.random.Generator, first: int, said: list[tuple[int, ...]], context_tokens: int
) -> list[GenerationRequest]:
    """Make a few requests of random length: common beginnings, next turns, and groups."""
    requests: list[GenerationRequest] = []
    for _ in range(3):
        rest = tuple(random.integers(2, 258, int(random.choice([1, 20, 100]))).tolist())
        prompt = (PROMPT * 8)[: random.integers(0, 41)] + rest
        if said and random.random() < 0.5:
            prompt = said[random.integers(len(said))]
        prompt = prompt[: context_tokens - 20]
        longest = min(context_tokens - len(prompt), int(random.choice([3, 40, 150, 300])))
        for _ in range(int(random.choice([1, 3]))):
            requests.append(
                request(
                    str(first + len(requests)),
                    prompt=prompt,
                    seed=int(random.integers(2**30)),
                    max_new_tokens=longest,
                    pinned=bool(random.random() < 0.3),
                    temperature=float(random.choice([1, 0.7])),
                )
            )
    return requests


def _all_agree(
    folder: Path, versions: Versions, *, seed: int, steps_ahead: int, num_contexts: int, chunk_tokens: int
) -> None:
    random = np.random.default_rng(seed)
    context_tokens = int(random.choice([256, 512, 520]))
    memory = EmbeddedConfig(cache_tokens=num_contexts * context_tokens, prefill_chunk_tokens=chunk_tokens)
    options = {"context_tokens": context_tokens, "num_slots": 6, "options": memory}
    requests: list[GenerationRequest] = []
    futures: list[Future[Completion]] = []
    said: list[tuple[int, ...]] = []
    with serving(folder, **options, steps_ahead=steps_ahead) as engine:
        for version in range(1, NUM_VERSIONS):
            more = _random_requests(random, len(requests), said, context_tokens)
            requests += more
            futures += engine.submit(more)
            time.sleep(random.random() * 0.2)
            engine.abort([str(random.integers(len(requests)))])
            done = [(one, future.result()) for one, future in zip(requests, futures, strict=True) if future.done()]
            said += [(*one.prompt_tokens, *completion.tokens.tolist(), 7) for one, completion in done[-4:]]
            engine.load_weights(version, versions[version].named_parameters()).result(timeout=60)
        completions = results(futures)
    for one, completion in zip(requests, completions, strict=True):
        assert completion.finish_reason == "abort" or len(completion.tokens) == one.sampling.max_new_tokens
        assert not one.pinned or len(set(completion.versions.tolist())) <= 1
        expected = logprobs_by_version(versions, one, completion)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-4, err_msg=one.request_id)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_logprobs_match_the_tagged_weights(
    seed: int, steps_ahead: int, tiny_folders: dict[str, Path], unequal: Versions
) -> None:
    _all_agree(tiny_folders["qwen2"], unequal, seed=seed, steps_ahead=steps_ahead, num_contexts=14, chunk_tokens=65536)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize(("num_contexts", "chunk_tokens"), [(1, 7), (2, 60)])
def test_logprobs_match_the_tokens_before_with_preemptions(
    num_contexts: int, chunk_tokens: int, steps_ahead: int, tiny_folders: dict[str, Path], equal: Versions
) -> None:
    # Weights are equal: a preempted completion is computed again under other weights than its tags.
    memory = {"num_contexts": num_contexts, "chunk_tokens": chunk_tokens}
    _all_agree(tiny_folders["qwen2"], equal, seed=num_contexts, steps_ahead=steps_ahead, **memory)
