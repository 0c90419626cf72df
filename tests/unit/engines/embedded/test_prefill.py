"""Prompts of the embedded engine: prefilled in chunks beside decoding, and reused from the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
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
from transformers import AutoModelForCausalLM

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded import scheduler
from areal_rloo.engines.embedded.cache import Cache, CacheRow, Prefixes
from areal_rloo.engines.embedded.parameters import Parameters
from areal_rloo.engines.embedded.transformer import Segment, prefill
from areal_rloo.trajectory import Completion

LONG = tuple(np.random.default_rng(2).integers(2, 258, 700).tolist())
NAMES = ["qwen2", "qwen3", "llama"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_prefill_in_chunks_changes_no_completion(name: str, chunk_tokens: int, tiny_folders: dict[str, Path]) -> None:
    first, *others = mixed_requests(9, longest=40)
    with serving(tiny_folders[name], options=EmbeddedConfig(prefill_chunk_tokens=chunk_tokens)) as engine:
        futures = engine.submit([request("beside", max_new_tokens=100)])
        wait_until(lambda: engine.statistics().decode_steps > 0)
        chunked = results(engine.submit([first, *others]))
        results(futures)
    with serving(tiny_folders[name]) as engine:
        whole = [results(engine.submit([one]))[0] for one in (first, *others)]
    assert_same(chunked, whole)
    assert_agree(chunked, learner_logprobs(tiny_folders[name], [first, *others], chunked), 1e-5)


def test_others_are_decoded_while_a_long_prompt_is_prefilled(tiny_folders: dict[str, Path]) -> None:
    options = {"context_tokens": 1024, "options": EmbeddedConfig(prefill_chunk_tokens=50)}
    with serving(tiny_folders["qwen2"], **options) as engine:
        (beside,) = engine.submit([request("beside", max_new_tokens=1000)])
        wait_until(lambda: engine.statistics().decode_steps > 0)
        before = engine.statistics()
        (long,) = engine.submit([request("long", prompt=LONG, max_new_tokens=1)])
        long.result(timeout=60)
        after = engine.statistics()
        engine.abort(["beside"])
        beside.result(timeout=60)
    num_chunks = -(-(len(LONG) - 1) // 50)
    assert after.prefill_tokens - before.prefill_tokens == len(LONG) - 1
    assert after.decode_steps - before.decode_steps >= num_chunks


def _next_turn(prompt: tuple[int, ...], completion: Completion, said: tuple[int, ...]) -> tuple[int, ...]:
    return (*prompt, *completion.tokens.tolist(), *said)


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_starts_from_the_cached_turn_before(name: str, tiny_folders: dict[str, Path]) -> None:
    requests: list[GenerationRequest] = []
    completions: list[Completion] = []
    prompt = PROMPT
    with serving(tiny_folders[name], context_tokens=512) as engine:
        for turn in range(4):
            requests.append(request(str(turn), prompt=prompt, seed=turn, max_new_tokens=50))
            completions += results(engine.submit(requests[-1:]))
            prompt = _next_turn(prompt, completions[-1], (3, 4, turn))
        statistics = engine.statistics()
    assert statistics.cached_tokens + statistics.prefill_tokens == sum(len(r.prompt_tokens) - 1 for r in requests)
    # Each turn computes the 3 tokens in between and the last token before, which was never in the cache. Lookup in
    # units of 16 tokens misses fewer than 16 tokens more.
    assert statistics.prefill_tokens <= len(PROMPT) - 1 + 3 * (3 + 16)
    assert_agree(completions, learner_logprobs(tiny_folders[name], requests, completions), 1e-5)


def test_later_samples_of_a_group_reuse_the_cached_prompt(tiny_folders: dict[str, Path]) -> None:
    requests = [request(str(i), prompt=LONG[:90], seed=i) for i in range(9)]
    with serving(tiny_folders["qwen2"], num_slots=2) as engine:
        completions = results(engine.submit(requests))
        statistics = engine.statistics()
    assert statistics.prefill_tokens == 89
    assert statistics.cached_tokens == 8 * 89
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)


def test_prompts_share_a_common_beginning(tiny_folders: dict[str, Path]) -> None:
    requests = [request(str(i), prompt=(*LONG[:64], 9, i, 11), seed=i) for i in range(2)]
    with serving(tiny_folders["qwen2"]) as engine:
        completions = [results(engine.submit([one]))[0] for one in requests]
        assert engine.statistics().cached_tokens == 65
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)


@pytest.mark.parametrize("when", ["between the turns", "within a turn"])
def test_tokens_cached_by_other_weights_are_computed_again(when: str, tiny_folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folders["qwen2"], dtype=torch.float32)
    weights = {name: parameter.detach() * 1.05 for name, parameter in model.named_parameters()}
    with serving(tiny_folders["qwen2"], context_tokens=1024) as engine:
        futures = engine.submit([request("0", max_new_tokens=400)])
        if when == "within a turn":
            wait_until(lambda: engine.statistics().decode_steps > 20)
            engine.load_weights(1, weights.items())
        (first,) = results(futures)
        engine.load_weights(1, weights.items()).result(timeout=60)
        prefilled = engine.statistics().prefill_tokens
        prompt = _next_turn(PROMPT, first, (3,))
        later = results(engine.submit([request("1", prompt=prompt)]))
        assert engine.statistics().prefill_tokens - prefilled == len(prompt) - 1
        assert engine.statistics().cached_tokens == 0
    with serving(tiny_folders["qwen2"], context_tokens=1024) as engine:
        engine.load_weights(1, weights.items()).result(timeout=60)
        expected = results(engine.submit([request("1", prompt=prompt)]))
    np.testing.assert_allclose(later[0].behaviour_logprobs, expected[0].behaviour_logprobs, rtol=0, atol=1e-5)


def test_a_prompt_computed_by_two_versions_is_not_reused(tiny_folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folders["qwen2"], dtype=torch.float32)
    options = {"context_tokens": 1024, "options": EmbeddedConfig(prefill_chunk_tokens=2)}
    with serving(tiny_folders["qwen2"], **options) as engine:
        futures = engine.submit([request("beside", max_new_tokens=1000)])
        wait_until(lambda: engine.statistics().decode_steps > 0)
        futures += engine.submit([request("first", prompt=LONG)])
        wait_until(lambda: engine.statistics().prefill_tokens > 50)
        engine.load_weights(1, model.named_parameters()).result(timeout=60)
        assert engine.statistics().prefill_tokens < len(LONG)
        futures[1].result(timeout=60)
        results(engine.submit([request("second", prompt=LONG)]))
        assert engine.statistics().cached_tokens == 0
        engine.abort(["beside"])
        results(futures)


def test_pinned_requests_do_not_reuse_tokens_of_newer_weights(tiny_folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folders["qwen2"], dtype=torch.float32)
    weights = {name: parameter.detach() * 1.05 for name, parameter in model.named_parameters()}
    requests = [request(f"pinned {i}", prompt=LONG[:40], seed=i, pinned=True) for i in range(2)]
    with serving(tiny_folders["qwen2"], context_tokens=1024) as engine:
        (holding,) = engine.submit([request("holds the version", max_new_tokens=900, pinned=True)])
        wait_until(lambda: engine.statistics().decode_steps > 0)
        pinned = results(engine.submit(requests[:1]))
        engine.load_weights(1, weights.items()).result(timeout=60)
        results(engine.submit([request("running", prompt=LONG[:40])]))
        pinned += results(engine.submit(requests[1:]))
        assert engine.statistics().cached_tokens == 39
        engine.abort(["holds the version"])
        holding.result(timeout=60)
    assert {version for completion in pinned for version in completion.versions.tolist()} == {0}
    assert_agree(pinned, learner_logprobs(tiny_folders["qwen2"], requests, pinned), 1e-5)


def test_kept_rows_are_evicted_before_a_request_is_preempted(tiny_folders: dict[str, Path]) -> None:
    options = {"context_tokens": 512, "options": EmbeddedConfig(cache_tokens=512)}
    with serving(tiny_folders["qwen2"], **options) as engine:
        results(engine.submit([request(str(i), prompt=LONG[i:][:20], seed=i) for i in range(6)]))
        (completion,) = results(engine.submit([request("long", max_new_tokens=500)]))
        assert engine.statistics().num_preempted == 0
    assert len(completion.tokens) == 500


def test_a_segment_after_cached_tokens_is_at_most_a_chunk(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments: list[Segment] = []

    def noted(parameters: Parameters, cache: Cache, chunk: list[Segment], rope: torch.Tensor) -> None:
        segments.extend(chunk)
        prefill(parameters, cache, chunk, rope)

    monkeypatch.setattr(scheduler, "prefill", noted)
    options = {"context_tokens": 1024, "options": EmbeddedConfig(prefill_chunk_tokens=64)}
    requests = [request(str(i), prompt=(*LONG[: 350 * i + 100], 7, i), max_new_tokens=3) for i in range(2)]
    with serving(tiny_folders["qwen2"], **options) as engine:
        completions = [results(engine.submit([one]))[0] for one in requests]
    assert len(segments[0].tokens) == 101, "no token is before the first segment"
    assert {len(segment.tokens) for segment in segments[1:-1]} == {64}
    assert len(segments[-1].tokens) <= 64
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)


def test_a_kept_conversation_stays_whole_while_memory_is_free(
    tiny_folders: dict[str, Path],
) -> None:
    first = request("first", prompt=LONG[:40], max_new_tokens=100)
    with serving(tiny_folders["qwen2"], context_tokens=512) as engine:
        (completion,) = results(engine.submit([first]))
        results(engine.submit([request(str(i), prompt=(*LONG[:32], i, *LONG[:110])) for i in range(2)]))
        before = engine.statistics()
        results(engine.submit([request("turn", prompt=_next_turn(first.prompt_tokens, completion, (3,)))]))
        after = engine.statistics()
    assert after.cached_tokens - before.cached_tokens == 139
    assert after.prefill_tokens - before.prefill_tokens == 1


def test_a_prompt_without_room_is_not_looked_up(tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []
    find = Prefixes.find

    def noted(self: Prefixes, tokens: np.ndarray, policy_version: int) -> tuple[CacheRow | None, int]:
        looked_up.append(len(tokens))
        return find(self, tokens, policy_version)

    monkeypatch.setattr(Prefixes, "find", noted)
    options = {"context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    with serving(tiny_folders["qwen2"], **options) as engine:
        results(engine.submit([request("before", max_new_tokens=500), request("waits", prompt=LONG, max_new_tokens=2)]))
    assert len(looked_up) < 8
