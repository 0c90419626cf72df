"""Test which advantages give the true expected gradient, on a softmax bandit with a known exact gradient.

A policy softmax(theta) chooses one of n arms with fixed rewards r. Exactly, d E[r] / d theta_a = p_a (r_a - E[r]); the
estimate of a group of K samples is mean_i A_i d log p(a_i) / d theta.
"""

import itertools
import math
from math import comb

import msgspec
import pytest
import torch
from support.token_weights import token_weights
from torch import Tensor

from areal_rloo.algorithm.loss import policy_loss
from areal_rloo.algorithm.normalization import normalize
from areal_rloo.config import PRESETS, AlgorithmConfig, LossConfig, NormConfig, PresetName

K = 4
NUM_GROUPS = 100_000
Z = 4.5  # standard errors: 7 in a million for one coordinate
REWARDS = torch.tensor([0.0, 1.0, 0.3, 2.0], dtype=torch.float64)
POLICY = torch.tensor([0.1, -0.4, 0.8, -1.0], dtype=torch.float64).softmax(0)
EXACT = POLICY * (REWARDS - (POLICY * REWARDS).sum())


def _norms(preset: PresetName) -> tuple[NormConfig, NormConfig]:
    algorithm = msgspec.convert(PRESETS[preset], AlgorithmConfig)
    return algorithm.reward_norm, algorithm.adv_norm


def _advantages(rewards: Tensor, group_ids: Tensor, preset: PresetName) -> Tensor:
    reward_norm, adv_norm = _norms(preset)
    one_token = torch.ones_like(group_ids)
    return normalize(normalize(rewards, group_ids, one_token, reward_norm), group_ids, one_token, adv_norm)


def _estimates(preset: PresetName) -> Tensor:
    """Return the gradient estimate of each group, [NUM_GROUPS, num_arms]."""
    arms = torch.multinomial(POLICY, NUM_GROUPS * K, replacement=True, generator=torch.Generator().manual_seed(0))
    group_ids = torch.arange(NUM_GROUPS).repeat_interleave(K)
    advantages = _advantages(REWARDS[arms], group_ids, preset)
    scores = torch.eye(len(POLICY), dtype=torch.float64)[arms] - POLICY
    return (advantages[:, None] * scores).view(NUM_GROUPS, K, -1).mean(1)


def _standard_errors_off(estimates: Tensor, value: Tensor) -> Tensor:
    return (estimates.mean(0) - value).abs() / (estimates.std(0) / math.sqrt(len(estimates)))


def test_all_rloo_presets_have_the_same_advantages() -> None:
    for preset in ("rloo_areal", "rloo_verl", "rloo_trl", "rloo_ms_swift"):
        assert _norms(preset) == _norms("rloo")


@pytest.mark.parametrize("preset", ["rloo", "reinforce"])
def test_advantages_of_a_preset_give_an_unbiased_gradient(preset: PresetName) -> None:
    assert float(_standard_errors_off(_estimates(preset), EXACT).max()) < Z


def test_leave_one_out_has_lower_variance_than_reinforce() -> None:
    with_baseline, without = _estimates("rloo").var(0), _estimates("reinforce").var(0)
    assert float(with_baseline.sum()) < 0.7 * float(without.sum())


def test_a_mean_including_the_sample_shrinks_the_gradient() -> None:
    """Dr. GRPO's advantage is RLOO's times (K - 1) / K: the same direction, and a smaller step."""
    estimates = _estimates("dr_grpo")
    assert float(_standard_errors_off(estimates, EXACT * (K - 1) / K).max()) < Z
    assert float(_standard_errors_off(estimates, EXACT).max()) > 10


def test_grpo_is_biased_in_direction() -> None:
    estimates = _estimates("grpo")
    mean = estimates.mean(0)
    scale = float((mean @ EXACT) / (EXACT @ EXACT))
    assert float(_standard_errors_off(estimates, scale * EXACT).max()) > 10


def _expected_binary_gradient(p: float, preset: PresetName, size: int = K) -> float:
    """Return the exact expected gradient by the logit of the correct arm of two, with rewards 1 and 0."""
    total = 0.0
    for right in range(size + 1):
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        advantages = _advantages(rewards, torch.zeros(size, dtype=torch.int64), preset)
        score = torch.tensor([1 - p] * right + [-p] * (size - right), dtype=torch.float64)
        total += comb(size, right) * p**right * (1 - p) ** (size - right) * float((advantages * score).mean())
    return total


@pytest.mark.parametrize("p", [0.02, 0.2, 0.5, 0.9])
def test_binary_rewards_give_the_known_expected_gradients(p: float) -> None:
    """GRPO divides by the deviation of the group, so hard and easy prompts weigh too much (arXiv:2503.20783). Its
    expected gradient by the logit is the expected deviation sqrt(q (1 - q)), with q the share of correct samples in the
    group. The true gradient is p (1 - p)."""
    deviation = sum(
        comb(K, right) * p**right * (1 - p) ** (K - right) * math.sqrt(right / K * (1 - right / K))
        for right in range(K + 1)
    )
    assert _expected_binary_gradient(p, "rloo") == pytest.approx(p * (1 - p), rel=1e-9)
    assert _expected_binary_gradient(p, "reinforce") == pytest.approx(p * (1 - p), rel=1e-9)
    assert _expected_binary_gradient(p, "dr_grpo") == pytest.approx((K - 1) / K * p * (1 - p), rel=1e-9)
    unbiased = math.sqrt((K - 1) / K)
    assert _expected_binary_gradient(p, "grpo") == pytest.approx(unbiased * deviation, rel=1e-5)


def test_grpo_overweights_hard_prompts() -> None:
    true = (0.02 * 0.98) / (0.5 * 0.5)
    hard, even = (_expected_binary_gradient(p, "grpo", 16) for p in (0.02, 0.5))
    assert hard / even > 1.5 * true
    hard, even = (_expected_binary_gradient(p, "rloo", 16) for p in (0.02, 0.5))
    assert hard / even == pytest.approx(true, rel=1e-9)


# Sequences of one or two tokens: stop, or continue and end in one of two ways.
SEQUENCES = ((0,), (1, 0), (1, 1))
OF_SEQUENCES = {(0,): 0.2, (1, 0): 1.0, (1, 1): 0.0}


def _logprobs(sequence: tuple[int, ...], theta: Tensor) -> Tensor:
    """Return the logprob of each choice, [num_tokens]; theta holds the logits of continuing and of the second end."""
    signs = torch.tensor([1.0 if choice else -1.0 for choice in sequence], dtype=torch.float64)
    return torch.nn.functional.logsigmoid(signs * theta[: len(sequence)])


def _expected_gradient(aggregation: str) -> Tensor:
    """Return the exact expected ascent direction of RLOO with groups of two, over all possible groups."""
    theta = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(2, dtype=torch.float64)
    for pair in itertools.product(SEQUENCES, repeat=2):
        chosen = [_logprobs(sequence, theta) for sequence in pair]
        probability = float(torch.cat(chosen).detach().sum().exp())
        current = torch.cat(chosen)
        index = torch.tensor([i for i, sequence in enumerate(pair) for _ in sequence])
        rewards = torch.tensor([OF_SEQUENCES[sequence] for sequence in pair], dtype=torch.float64)
        advantages = _advantages(rewards, torch.zeros(2, dtype=torch.int64), "rloo")
        config = LossConfig(aggregation=aggregation)  # type: ignore[arg-type]
        loss = policy_loss(
            behaviour_logprobs=current.detach(),
            proximal_logprobs=current.detach(),
            current_logprobs=current,
            entropy=torch.zeros(len(current)),
            advantages=advantages[index],
            token_weights=token_weights(
                torch.ones(len(current), dtype=torch.bool), index, max_new_tokens=2, config=config
            ),
            staleness=torch.zeros(len(current), dtype=torch.int64),
            sequence_index=index,
            config=config,
        ).loss
        (gradient,) = torch.autograd.grad(-loss, theta)
        expected += probability * gradient
    return expected


def _true_gradient() -> Tensor:
    theta = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    value = sum(_logprobs(sequence, theta).sum().exp() * OF_SEQUENCES[sequence] for sequence in SEQUENCES)
    assert isinstance(value, Tensor)
    return torch.autograd.grad(value, theta)[0]


def test_sum_over_tokens_is_unbiased_up_to_a_constant_length() -> None:
    torch.testing.assert_close(_expected_gradient("seq_mean_token_sum"), _true_gradient(), rtol=1e-6, atol=0)
    torch.testing.assert_close(_expected_gradient("seq_mean_token_sum_norm"), _true_gradient() / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_means_over_tokens_are_biased_by_length_in_direction(aggregation: str) -> None:
    """Both weight a token by the sampled lengths (arXiv:2503.20783, section 3.1)."""
    shares = _expected_gradient(aggregation) / _true_gradient()
    assert float(shares.max() / shares.min()) > 1.05
