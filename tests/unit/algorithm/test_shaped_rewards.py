"""Test shaped rewards and token returns against hand-computed values and a slow reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.algorithm.normalization import REWARD_LIMIT, shape_rewards, token_returns
from areal_rloo.config import RewardsConfig


def _shaped(
    rewards: list[float],
    config: RewardsConfig,
    *,
    num_tokens: list[int] | None = None,
    truncated: list[bool] | None = None,
    has_eos: list[bool] | None = None,
) -> list[float]:
    num = len(rewards)
    shaped: list[float] = shape_rewards(
        torch.tensor(rewards, dtype=torch.float64),
        num_tokens=torch.tensor(num_tokens or [1] * num),
        truncated=torch.tensor(truncated or [False] * num),
        has_eos=torch.tensor(has_eos or [True] * num),
        max_new_tokens=100,
        config=config,
    ).tolist()
    return shaped


def test_default_shaping_keeps_the_reward_of_the_task() -> None:
    ended = {"num_tokens": [100, 1, 50], "truncated": [True, False, True], "has_eos": [False, True, False]}
    assert _shaped([1.0, -0.5, 3.25], RewardsConfig(), **ended) == [1.0, -0.5, 3.25]  # type: ignore[arg-type]


def test_shaping_adds_bias_then_scales_then_clips() -> None:
    assert _shaped([1.0, 0.0], RewardsConfig(bias=-0.5, scale=10.0)) == [5.0, -5.0]
    assert _shaped([1.0, 0.0], RewardsConfig(bias=-0.5, scale=10.0, clip=(-1.0, 4.0))) == [4.0, -1.0]


def test_soft_overlong_penalty_grows_linearly_as_in_dapo() -> None:
    config = RewardsConfig(overlong_tokens=20, overlong_penalty=0.5)
    got = _shaped([1.0] * 5, config, num_tokens=[10, 80, 85, 90, 100])
    assert got == pytest.approx([1.0, 1.0, 1 - 0.5 * 5 / 20, 1 - 0.5 * 10 / 20, 0.5])


def test_truncation_and_missing_eos_have_separate_penalties() -> None:
    config = RewardsConfig(truncated_penalty=0.25, missing_eos_penalty=0.5)
    got = _shaped([1.0] * 4, config, truncated=[False, True, False, True], has_eos=[True, True, False, False])
    assert got == [1.0, 0.75, 0.5, 0.25]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.floats(-1e300, 1e300))
def test_any_finite_reward_gives_a_limited_shaped_reward(rewards: list[float], scale: float) -> None:
    shaped = _shaped(rewards, RewardsConfig(scale=scale, bias=1e308))
    assert all(math.isfinite(reward) and abs(reward) <= REWARD_LIMIT for reward in shaped)


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=7), min_size=1, max_size=4),
    st.floats(0.1, 1.0),
)
def test_returns_equal_the_discounted_sum_of_later_rewards(rewards: list[list[float]], discount: float) -> None:
    got = token_returns([torch.tensor(own, dtype=torch.float64) for own in rewards], discount)
    for own, returns in zip(rewards, got, strict=True):
        expected = [sum(discount ** (s - t) * own[s] for s in range(t, len(own))) for t in range(len(own))]
        assert returns.tolist() == pytest.approx(expected)
