"""Steps launched before the host reads the last tokens make the same completions."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from support.requests_to_serve import assert_same, mixed_requests, request, results, serving, wait_until
from transformers import AutoModelForCausalLM

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.embedded.cache import CacheRow, RowKind
from areal_rloo.engines.embedded.requests import PlacedRequest, Submission, WaitingRequest

STOPS = tuple(range(2, 14))  # of 258 tokens, so that some completions stop early


@pytest.mark.parametrize(
    ("name", "stop_token_ids", "steps_ahead"), [("qwen2", (), 1), ("qwen3", STOPS, 1), ("llama", STOPS, 3)]
)
def test_launching_ahead_changes_no_completion(
    name: str, stop_token_ids: tuple[int, ...], steps_ahead: int, tiny_folders: dict[str, Path]
) -> None:
    requests = mixed_requests(17, stop_token_ids=stop_token_ids)
    with serving(tiny_folders[name], num_slots=5, steps_ahead=0) as engine:
        expected = results(engine.submit(requests))
    with serving(tiny_folders[name], num_slots=5, steps_ahead=steps_ahead) as engine:
        completions = results(engine.submit(requests))
        assert engine.statistics().num_finished == 17
        assert engine.statistics().generated_tokens == sum(len(completion.tokens) for completion in completions)
    assert_same(completions, expected)
    if stop_token_ids:
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_launching_ahead_with_preemptions_changes_no_completion(tiny_folders: dict[str, Path]) -> None:
    requests = mixed_requests(10, longest=230, stop_token_ids=(2,))
    options = {"context_tokens": 512, "options": EmbeddedConfig(cache_tokens=512)}
    with serving(tiny_folders["qwen2"], **options, steps_ahead=0) as engine:
        expected = results(engine.submit(requests))
    with serving(tiny_folders["qwen2"], **options, steps_ahead=1) as engine:
        completions = results(engine.submit(requests))
        assert engine.statistics().num_preempted > 0
    assert_same(completions, expected)


def test_a_full_context_writes_nothing_past_its_end(
    tiny_folders: dict[str, Path],
) -> None:
    # The request in the last slot, at the end of the table, ends while the other request is decoded.
    options = {"context_tokens": 1030, "num_slots": 2}
    first, second = requests = [request(str(i), prompt=(5,), seed=i, max_new_tokens=1029) for i in range(2)]
    with serving(tiny_folders["qwen2"], **options, steps_ahead=0) as engine:
        expected = results(engine.submit(requests))
    with serving(tiny_folders["qwen2"], **options, steps_ahead=3) as engine:
        futures = engine.submit([request("before", prompt=(9,), max_new_tokens=10), first])
        wait_until(lambda: engine.statistics().num_finished == 1)
        futures += engine.submit([second])
        completions = results(futures)
    assert_same(completions[1:], expected)


def test_updates_and_aborts_lose_or_double_no_token(tiny_folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folders["qwen2"], dtype=torch.float32)
    with serving(tiny_folders["qwen2"], context_tokens=1024, steps_ahead=1) as engine:
        futures = engine.submit([request(str(i), seed=i, max_new_tokens=900 + i) for i in range(6)])
        for version in range(1, 8):
            wait_until(lambda version=version: engine.statistics().decode_steps > 30 * version)  # type: ignore[misc]
            engine.load_weights(version, model.named_parameters()).result(timeout=60)
        engine.abort(["5"])
        completions = results(futures)
    assert [len(completion.tokens) for completion in completions[:5]] == [900 + i for i in range(5)]
    for completion in completions:
        assert len(completion.tokens) == len(completion.behaviour_logprobs) == len(completion.versions)
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        assert set(completion.versions.tolist()) == set(range(8))
    assert completions[5].finish_reason == "abort"


def test_weights_after_the_last_token_tag_no_token() -> None:
    new = WaitingRequest.of(Submission(request("a"), Future(), seed=0, arrival=0))
    spans = [(4, 0), (5, 2), (6, 4)]  # the token of index 3 was launched and discarded
    placed = PlacedRequest(new, CacheRow(128, 0, RowKind.RUNNING), 0, 4, spans)
    ended = placed.without_row(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32))
    assert ended.completion("stop").versions.tolist() == [4, 4, 5]
