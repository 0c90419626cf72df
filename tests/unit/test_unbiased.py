"""Which advantages give the true gradient in expectation, on a softmax bandit small enough to know it exactly.

A policy softmax(theta) chooses one of n arms with fixed rewards r. Exactly, d E[r] / d theta_a = p_a (r_a - E[r]); the
estimate of a group of K samples is mean_i A_i d log p(a_i) / d theta.
"""

import math
from math import comb

import msgspec
import pytest
import torch
from torch import Tensor

from areal_rloo.algorithm.advantage import normalize
from areal_rloo.config import PRESETS, AlgorithmConfig, NormConfig, PresetName

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
    """[NUM_GROUPS, num_arms]: the gradient as each group estimates it."""
    arms = torch.multinomial(POLICY, NUM_GROUPS * K, replacement=True, generator=torch.Generator().manual_seed(0))
    group_ids = torch.arange(NUM_GROUPS).repeat_interleave(K)
    advantages = _advantages(REWARDS[arms], group_ids, preset)
    scores = torch.eye(len(POLICY), dtype=torch.float64)[arms] - POLICY
    return (advantages[:, None] * scores).view(NUM_GROUPS, K, -1).mean(1)


def _standard_errors_off(estimates: Tensor, value: Tensor) -> Tensor:
    return (estimates.mean(0) - value).abs() / (estimates.std(0) / math.sqrt(len(estimates)))


@pytest.mark.parametrize("preset", ["rloo", "rloo_areal", "rloo_verl", "rloo_trl", "rloo_ms_swift", "reinforce"])
def test_the_gradient_is_unbiased(preset: PresetName) -> None:
    assert float(_standard_errors_off(_estimates(preset), EXACT).max()) < Z


def test_leaving_one_out_lowers_the_variance_of_reinforce() -> None:
    with_baseline, without = _estimates("rloo").var(0), _estimates("reinforce").var(0)
    assert float(with_baseline.sum()) < 0.7 * float(without.sum())


def test_a_mean_with_oneself_in_it_shrinks_the_gradient_by_one_in_k() -> None:
    """Dr. GRPO's advantage is RLOO's times (K - 1) / K: the same direction, and a smaller step."""
    estimates = _estimates("dr_grpo")
    assert float(_standard_errors_off(estimates, EXACT * (K - 1) / K).max()) < Z
    assert float(_standard_errors_off(estimates, EXACT).max()) > 10


def test_grpo_is_biased_and_not_only_in_scale() -> None:
    estimates = _estimates("grpo")
    mean = estimates.mean(0)
    scale = float((mean @ EXACT) / (EXACT @ EXACT))
    assert float(_standard_errors_off(estimates, scale * EXACT).max()) > 10


def _expected_binary_gradient(p: float, preset: PresetName, size: int = K) -> float:
    """d/d logit of the right arm of two, rewards 1 and 0: the mean over every outcome of a group, exactly."""
    total = 0.0
    for right in range(size + 1):
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
        advantages = _advantages(rewards, torch.zeros(size, dtype=torch.int64), preset)
        score = torch.tensor([1 - p] * right + [-p] * (size - right), dtype=torch.float64)
        total += comb(size, right) * p**right * (1 - p) ** (size - right) * float((advantages * score).mean())
    return total


@pytest.mark.parametrize("p", [0.02, 0.2, 0.5, 0.9])
def test_with_binary_rewards_the_expected_gradient_is_known_for_each_baseline(p: float) -> None:
    """GRPO divides by the group's deviation, so hard and easy prompts weigh more than they should (arXiv:2503.20783):
    its expectation is that of the deviation itself, sqrt(q (1 - q)), q the share of right ones in the group."""
    deviation = sum(
        comb(K, right) * p**right * (1 - p) ** (K - right) * math.sqrt(right / K * (1 - right / K))
        for right in range(K + 1)
    )
    assert _expected_binary_gradient(p, "rloo") == pytest.approx(p * (1 - p), rel=1e-9)
    assert _expected_binary_gradient(p, "reinforce") == pytest.approx(p * (1 - p), rel=1e-9)
    assert _expected_binary_gradient(p, "dr_grpo") == pytest.approx((K - 1) / K * p * (1 - p), rel=1e-9)
    unbiased = math.sqrt((K - 1) / K)
    assert _expected_binary_gradient(p, "grpo") == pytest.approx(unbiased * deviation, rel=1e-5)


def test_grpo_weighs_a_hard_prompt_more_against_an_even_one_than_the_true_gradient_does() -> None:
    true = (0.02 * 0.98) / (0.5 * 0.5)
    hard, even = (_expected_binary_gradient(p, "grpo", 16) for p in (0.02, 0.5))
    assert hard / even > 1.5 * true
    hard, even = (_expected_binary_gradient(p, "rloo", 16) for p in (0.02, 0.5))
    assert hard / even == pytest.approx(true, rel=1e-9)
