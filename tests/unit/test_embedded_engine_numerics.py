"""Logprobs of the embedded engine are the learner's, whatever a completion was decoded with."""

from pathlib import Path

import pytest
from requests_to_serve import (
    assert_agree,
    assert_same,
    learner_logprobs,
    mixed_requests,
    request,
    results,
    serving,
)

NAMES = ["qwen2", "qwen3", "llama"]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_the_learners_within_1e5(name: str, tiny_folders: dict[str, Path]) -> None:
    requests = mixed_requests(17, temperature=0.7)
    with serving(tiny_folders[name], num_slots=17) as engine:
        completions = results(engine.submit(requests))
    assert_agree(completions, learner_logprobs(tiny_folders[name], requests, completions), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_17_mixed_lengths_changes_no_completion(name: str, tiny_folders: dict[str, Path]) -> None:
    requests = mixed_requests(17)
    with serving(tiny_folders[name], num_slots=17) as engine:
        together = results(engine.submit(requests))
        alone = [results(engine.submit([one]))[0] for one in requests]
    assert_same(together, alone)


def test_long_completions_are_the_learners_too(tiny_folders: dict[str, Path]) -> None:
    requests = [request(str(i), seed=i, max_new_tokens=200 + 300 * i) for i in range(4)]
    with serving(tiny_folders["qwen2"], context_tokens=1200) as engine:
        completions = results(engine.submit(requests))
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)
