"""Memory of the embedded engine: limited in tokens, shared by all requests, freed by preempting the latest."""

import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded.cache import RowKind, tokens_for
from areal_rloo.engines.embedded.parameters import Parameters, load_checkpoint
from areal_rloo.engines.embedded.requests import Submission, WaitingQueue, WaitingRequest
from areal_rloo.errors import GenerationError
from areal_rloo.models.device import DeviceMemory
from areal_rloo.trajectory import Completion


def _together_and_alone(
    folder: Path, requests: list[GenerationRequest], **options: object
) -> tuple[list[Completion], list[Completion], int]:
    """Return completions under the options, completions made with enough memory, and the number of preemptions."""
    with serving(folder, **options) as engine:
        together = results(engine.submit(requests))
        num_preempted = engine.statistics().num_preempted
    with serving(folder, context_tokens=options["context_tokens"]) as engine:
        alone = [results(engine.submit([one]))[0] for one in requests]
    return together, alone, num_preempted


def test_a_long_completion_may_use_all_memory_beside_64_slots(tiny_folders: dict[str, Path]) -> None:
    options = {"num_slots": 64, "context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    requests = [request("long", max_new_tokens=1000), *(request(str(i), seed=i) for i in range(8))]
    with serving(tiny_folders["qwen2"], **options) as engine:
        completions = results(engine.submit(requests))
    assert [len(completion.tokens) for completion in completions] == [1000, *[20] * 8]
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)


@pytest.mark.parametrize(("name", "pinned"), [("qwen2", False), ("qwen3", False), ("llama", True)])
def test_preemption_changes_no_completion(name: str, pinned: bool, tiny_folders: dict[str, Path]) -> None:
    requests = mixed_requests(10, longest=230, pinned=pinned)
    options = {"num_slots": 8, "context_tokens": 512, "options": EmbeddedConfig(cache_tokens=512)}
    together, alone, num_preempted = _together_and_alone(tiny_folders[name], requests, **options)
    assert num_preempted > 0
    assert_same(together, alone)
    assert_agree(together, learner_logprobs(tiny_folders[name], requests, together), 1e-5)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    cache_tokens=st.integers(256, 700),
    chunk_tokens=st.integers(1, 40),
    pinned=st.integers(0, 3),
)
def test_every_request_gets_all_tokens_under_any_load_and_memory(
    tiny_folders: dict[str, Path], lengths: list[int], cache_tokens: int, chunk_tokens: int, pinned: int
) -> None:
    requests = [
        request(str(i), prompt=PROMPT[: 1 + i % 5], seed=i, max_new_tokens=num, pinned=pinned > 0 and i % pinned == 0)
        for i, num in enumerate(lengths)
    ]
    options = EmbeddedConfig(cache_tokens=cache_tokens, prefill_chunk_tokens=chunk_tokens)
    with serving(tiny_folders["llama"], num_slots=4, context_tokens=256, options=options) as engine:
        completions = results(engine.submit(requests))
        statistics = engine.statistics()
    assert [len(completion.tokens) for completion in completions] == lengths
    assert statistics.generated_tokens == sum(lengths)
    assert statistics.num_finished == len(lengths)
    assert_agree(completions, learner_logprobs(tiny_folders["llama"], requests, completions), 1e-5)


def test_the_first_submitted_request_is_never_preempted(tiny_folders: dict[str, Path]) -> None:
    requests = [request(str(i), seed=i, max_new_tokens=200) for i in range(4)]
    ended: list[int] = []
    options = {"context_tokens": 256, "options": EmbeddedConfig(cache_tokens=640)}
    with serving(tiny_folders["qwen2"], **options) as engine:
        futures = engine.submit(requests)
        for index, future in enumerate(futures):
            future.add_done_callback(lambda _, index=index: ended.append(index))  # type: ignore[misc]
        results(futures)
        assert engine.statistics().num_preempted > 0
    assert ended == sorted(ended)


def test_tokens_around_a_preemption_have_the_right_versions(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen2"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    with serving(folder, **options) as engine:
        first, second = engine.submit([request(str(i), seed=i, max_new_tokens=1000) for i in range(2)])
        wait_until(lambda: engine.statistics().num_preempted > 0)
        weights = {name: parameter.detach() * 1.02 for name, parameter in model.named_parameters()}
        engine.load_weights(1, weights.items()).result(timeout=60)
        one, other = results([first, second])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    for completion in (one, other):
        assert set(completion.versions.tolist()) == {0, 1}
        assert (np.diff(completion.versions) >= 0).all()
        assert len(completion.tokens) == len(completion.versions) == 1000
    # The preempted request was computed again under version 1, so its later tokens are exactly of version 1.
    repeated = learner_logprobs(_as_policy(folder, 1.02), [request("1", max_new_tokens=1000)], [other])[0]
    later = other.versions == 1
    np.testing.assert_allclose(other.behaviour_logprobs[later], repeated[later], rtol=0, atol=1e-5)


def _as_policy(folder: Path, factor: float) -> torch.nn.Module:
    from areal_rloo.models.loading import load_policy

    model = load_policy(str(folder), device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def test_a_request_larger_than_the_cache_is_refused_with_the_key(tiny_folders: dict[str, Path]) -> None:
    options = EmbeddedConfig(cache_tokens=256)
    with serving(tiny_folders["qwen2"], context_tokens=1024, options=options) as engine:
        (refused,) = engine.submit([request("a", max_new_tokens=300)])
        with pytest.raises(
            GenerationError,
            match=r"request a: needs 305 tokens, the cache holds 256; raise rollout\.embedded\.cache_tokens",
        ):
            refused.result(timeout=0)
        (completion,) = results(engine.submit([request("a", max_new_tokens=251)]))
    assert len(completion.tokens) == 251


def test_aborting_a_preempted_request_returns_its_tokens(tiny_folders: dict[str, Path]) -> None:
    options = {"context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    with serving(tiny_folders["qwen2"], **options) as engine:
        futures: list[Future[Completion]] = engine.submit(
            [request(str(i), seed=i, max_new_tokens=1000) for i in range(2)]
        )
        wait_until(lambda: engine.statistics().num_preempted > 0)
        engine.abort(["1"])
        aborted = futures[1].result(timeout=60)
        engine.abort(["0"])
    assert aborted.finish_reason == "abort"
    assert len(aborted.tokens) == len(aborted.behaviour_logprobs) == len(aborted.versions) > 100
    assert len(set(aborted.versions.tolist())) == 1


def test_a_preempted_pinned_request_keeps_its_weights(
    tiny_folders: dict[str, Path],
) -> None:
    weights = dict(model_of(tiny_folders["qwen2"], factor=1.05).named_parameters())
    options = {"context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    one = request("pinned", seed=2, max_new_tokens=600, pinned=True)
    with serving(tiny_folders["qwen2"], **options) as engine:
        futures = engine.submit([request("first", max_new_tokens=600), one])
        wait_until(lambda: engine.statistics().num_preempted > 0)
        engine.load_weights(1, weights.items()).result(timeout=60)
        _, completion = results(futures)
        (later,) = results(engine.submit([request("later", pinned=True)]))
    assert set(completion.versions.tolist()) == {0}
    assert_agree([completion], learner_logprobs(tiny_folders["qwen2"], [one], [completion]), 1e-5)
    assert set(later.versions.tolist()) == {1}


@pytest.mark.parametrize("pinned", [False, True])
def test_later_requests_do_not_pass_a_request_without_memory(pinned: bool, tiny_folders: dict[str, Path]) -> None:
    options = {"context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    requests = [
        request("before", prompt=(6,) * 300, max_new_tokens=100, pinned=not pinned),
        request("large", prompt=(5,) * 500, max_new_tokens=10, pinned=pinned),
        *(request(f"after {i}", max_new_tokens=5, pinned=not pinned) for i in range(5)),
    ]
    order: list[str] = []
    with serving(tiny_folders["qwen2"], **options) as engine:
        futures = engine.submit(requests)
        for one, future in zip(requests, futures, strict=True):
            future.add_done_callback(lambda _, name=one.request_id: order.append(name))  # type: ignore[misc]
        results(futures)
    assert order[0] == "before"


def test_a_preempted_request_ends_while_others_keep_coming(
    tiny_folders: dict[str, Path],
) -> None:
    options = {"context_tokens": 1024, "options": EmbeddedConfig(cache_tokens=1024)}
    num_others = 0
    with serving(tiny_folders["qwen2"], **options) as engine:
        _, pinned = engine.submit(
            [request("first", max_new_tokens=600), request("pinned", seed=2, max_new_tokens=700, pinned=True)]
        )
        wait_until(lambda: engine.statistics().num_preempted > 0)
        while not pinned.done():
            statistics = engine.statistics()
            for _ in range(8 - statistics.num_running - statistics.num_waiting):
                engine.submit([request(f"other {num_others}", max_new_tokens=50 + num_others % 50)])
                num_others += 1
            assert num_others < 300, "the pinned request starves"
            time.sleep(0.001)


def _waiting(arrival: int, *, begun: bool = False, **options: object) -> WaitingRequest:
    waiting = WaitingRequest.of(Submission(request(str(arrival), **options), Future(), seed=0, arrival=arrival))
    return replace(waiting, spans=((0, 0),)) if begun else waiting


def test_a_request_for_newer_weights_does_not_block_the_queue() -> None:
    queue = WaitingQueue()
    for waiting in (_waiting(0, min_version=2), _waiting(2), _waiting(1)):
        queue.add(waiting)
    first = queue.first(RowKind.RUNNING, 1, 1)
    assert first is not None
    assert first.submission.arrival == 1
    assert queue.any_for(0)


def test_newer_pinned_weights_only_wait_for_started_requests() -> None:
    queue = WaitingQueue()
    begun, newer, older = (
        _waiting(2, begun=True, pinned=True),
        _waiting(0, min_version=1, pinned=True),
        _waiting(1, pinned=True),
    )
    for waiting in (begun, newer, older):
        queue.add(waiting)
    assert queue.holds_weights
    assert queue.first(RowKind.PINNED, 0, 0) is older, "weights that are not loaded block no request"
    assert queue.first(RowKind.PINNED, 0, 1) is begun
    assert queue.take({begun.submission}) == [begun]
    assert not queue.holds_weights
    assert queue.first(RowKind.PINNED, 0, 1) is None
    assert queue.first(RowKind.PINNED, 1, 1) is newer


@pytest.mark.parametrize("context_tokens", [100, 128, 300])
def test_by_default_every_slot_has_room_for_a_whole_context(tiny_folders: dict[str, Path], context_tokens: int) -> None:
    num_made = context_tokens - len(PROMPT)
    with serving(tiny_folders["qwen2"], num_slots=6, context_tokens=context_tokens) as engine:
        for each in range(2):  # the second time beside kept rows
            before = engine.statistics().decode_steps
            asked = [request(f"{each}-{i}", prompt=(i, *PROMPT[1:]), max_new_tokens=num_made) for i in range(1, 7)]
            results(engine.submit(asked))
            assert engine.statistics().decode_steps - before == num_made, "all were decoded together"
        assert engine.statistics().num_preempted == 0


def test_by_default_no_more_than_half_of_the_free_memory_is_taken(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": torch.device("cpu"), "dtype": torch.float32}
    parameters, *_ = load_checkpoint(tiny_folders["qwen2"], context_tokens=64, **options)  # type: ignore[arg-type]
    a = parameters.architecture
    token_bytes = 4 * a.num_kv_heads * (2 * a.num_layers * a.head_dim + 1)  # keys and values of each layer, and a mask
    free = DeviceMemory(free_bytes=2 * 3000 * token_bytes, total_bytes=2**60)
    monkeypatch.setattr("areal_rloo.engines.embedded.cache.memory_of", lambda device: free)
    assert tokens_for(1000, 512, a, **options) == 3000
    assert tokens_for(1000, 4096, a, **options) == 4096, "one context at least"
    assert tokens_for(2, 512, a, **options) < 3000


def test_at_most_two_copies_of_the_weights_are_in_memory(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the running policy and of the evaluation, also when the next evaluation waits at an update."""
    made: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []
    make = Parameters.__init__

    def counted(self: Parameters, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        made.append(weakref.ref(self.embedding))
        num_alive.append(sum(copy() is not None for copy in made))

    monkeypatch.setattr(Parameters, "__init__", counted)
    model = model_of(tiny_folders["qwen2"])
    with serving(tiny_folders["qwen2"]) as engine:
        for version in range(3):
            futures = engine.submit([request(str(version), pinned=True, min_version=version)])
            if version:
                engine.load_weights(version, model.named_parameters()).result(timeout=60)
            assert set(results(futures)[0].versions.tolist()) == {version}
    assert num_alive == [1, 2, 2, 2]
