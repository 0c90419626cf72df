"""The embedded engine's logprobs are the learner's, for any batch of completions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.requests_to_serve import (
    assert_agree,
    assert_same,
    learner_logprobs,
    mixed_requests,
    request,
    results,
    serving,
)

from areal_rloo.config import TinyModelConfig
from areal_rloo.engines.embedded.sampling import choose, drawn, place_above, rising, uniforms
from areal_rloo.models.tiny import make_tiny_model, save_tiny_model

NAMES = ["qwen2", "qwen3", "llama"]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_the_learners_within_1e5(name: str, tiny_folders: dict[str, Path]) -> None:
    requests = mixed_requests(17, temperature=0.7)
    with serving(tiny_folders[name], num_slots=17) as engine:
        completions = results(engine.submit(requests))
    assert_agree(completions, learner_logprobs(tiny_folders[name], requests, completions), 1e-5)


def _bfloat16_errors(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return differences of bfloat16 logprobs: engine - learner, engine - exact, learner - exact (float32)."""
    requests = mixed_requests(17)
    with serving(folder, num_slots=17, dtype=torch.bfloat16) as engine:
        completions = results(engine.submit(requests))
    made = np.concatenate([completion.behaviour_logprobs for completion in completions])
    learner, exact = (
        np.concatenate(learner_logprobs(folder, requests, completions, dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    return made - learner, made - exact, learner - exact


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logprobs_are_the_learners_within_2e2(name: str, tmp_path: Path) -> None:
    recipe = TinyModelConfig(architecture=name, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
    model = make_tiny_model(recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    save_tiny_model(model, tmp_path)
    difference, _, _ = _bfloat16_errors(tmp_path)
    assert np.abs(difference).max() < 2e-2


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_error_is_no_larger_than_the_learners(name: str, tiny_folders: dict[str, Path]) -> None:
    # Logits of these models reach 8, which bfloat16 rounds by up to 2^-6: no logprobs are within 2e-2 of exact.
    _, of_engine, of_learner = _bfloat16_errors(tiny_folders[name])
    assert np.abs(of_engine).mean() < 1.25 * np.abs(of_learner).mean()


@pytest.mark.parametrize("name", NAMES)
def test_batching_17_mixed_lengths_changes_no_completion(name: str, tiny_folders: dict[str, Path]) -> None:
    requests = mixed_requests(17)
    with serving(tiny_folders[name], num_slots=17) as engine:
        together = results(engine.submit(requests))
        alone = [results(engine.submit([one]))[0] for one in requests]
    assert_same(together, alone)


def test_long_completions_have_the_learners_logprobs(tiny_folders: dict[str, Path]) -> None:
    requests = [request(str(i), seed=i, max_new_tokens=200 + 300 * i) for i in range(4)]
    with serving(tiny_folders["qwen2"], context_tokens=1200) as engine:
        completions = results(engine.submit(requests))
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)


def test_attention_output_may_have_any_memory_layout(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = F.scaled_dot_product_attention

    def strided(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:  # as some GPU kernels return
        return attention(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    requests = mixed_requests(7)
    with serving(tiny_folders["qwen2"], dtype=torch.bfloat16) as engine:
        expected = results(engine.submit(requests))
    monkeypatch.setattr(F, "scaled_dot_product_attention", strided)
    with serving(tiny_folders["qwen2"], dtype=torch.bfloat16) as engine:
        completions = results(engine.submit(requests))
    assert_same(completions, expected)


LOGITS = st.one_of(st.floats(-30, 30), st.sampled_from([-torch.inf, -1e30, -1e4, -110.0, 1e4]))
UNIFORM = st.floats(0, 1, exclude_max=True)


@given(logits=st.lists(LOGITS, min_size=1, max_size=40).filter(lambda row: max(row) > -1e3), uniform=UNIFORM)
def test_a_token_of_probability_0_is_never_chosen(logits: list[float], uniform: float) -> None:
    tokens, logprobs = choose(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), None)
    assert torch.isfinite(logprobs).all()
    assert torch.tensor([logits]).log_softmax(-1).exp()[0, tokens[0]] > 0


@given(
    parts=st.lists(st.sampled_from([0.0, 0.0, 1e-9, 1e-3, 0.2]), min_size=1, max_size=40).filter(any),
    seed=st.integers(0, 1000),
    uniform=UNIFORM,
)
def test_rounded_sums_choose_no_token_of_probability_0(parts: list[float], seed: int, uniform: float) -> None:
    probabilities = torch.tensor([parts]) / sum(parts)
    noise = torch.randn(probabilities.shape, generator=torch.Generator().manual_seed(seed)) * 1e-6
    cumulated = rising(probabilities.cumsum(-1, dtype=torch.float64) * (1 + noise), probabilities)
    assert (cumulated.diff(dim=-1) >= 0).all()
    assert probabilities[0, place_above(cumulated, uniform * cumulated[:, -1:])[0]] > 0


@pytest.mark.parametrize("num_tokens", [1024, 1025, 2048, 5000])
def test_a_token_is_drawn_where_the_sums_pass_the_uniform_number(num_tokens: int) -> None:
    """In parts or not; also in parts, and at ends of parts, whose probabilities are all 0."""
    random = np.random.default_rng(num_tokens)
    probabilities = random.dirichlet(np.full(num_tokens, 0.3), size=400).astype(np.float32)
    probabilities[100:200, 400:1024] = 0
    probabilities[200:300, -300:] = 0
    probabilities[300:, :512] = 0
    uniform = np.concatenate([random.random(396), [0, 1 - 2**-53] * 2])
    tokens = drawn(torch.from_numpy(probabilities), torch.from_numpy(uniform)).numpy()[:, 0]
    sums = probabilities.astype(np.float64).cumsum(axis=1)
    at, rows = uniform * sums[:, -1], np.arange(len(tokens))
    assert (probabilities[rows, tokens] > 0).all()
    assert (at <= sums[rows, tokens] + 1e-12).all()
    assert (at >= sums[rows, tokens] - probabilities[rows, tokens] - 1e-12).all()


def test_the_tail_of_a_large_vocabulary_can_be_chosen() -> None:
    """The last half of the tokens has probabilities of 3e-11 to 1e-10: in float32, 99 of 100 are never chosen."""
    logits = -2 * torch.arange(1, 152_001).float().log()[None]
    exact = logits.double().softmax(-1)[0]
    middle = exact.cumsum(0) - exact / 2
    asked = torch.arange(76_000, 152_000, 500)
    tokens, _ = choose(logits.expand(len(asked), -1), middle[asked], None)
    assert float((middle[tokens] - middle[asked]).abs().max()) < 1e-6
    assert len(set(tokens.tolist())) == len(asked)


def test_uniform_numbers_are_finer_than_float32() -> None:
    """In steps of 2^-24, they would skip tokens with smaller probabilities."""
    numbers = uniforms(0, 100)
    assert numbers.dtype == torch.float64
    assert bool((numbers * 2**24 != (numbers * 2**24).floor()).any())
