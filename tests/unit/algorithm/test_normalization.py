"""Test normalization against a slow reference, and its invariants."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.algorithm.normalization import normalize
from areal_rloo.config import NormConfig

RLOO = NormConfig(mean_level="group", mean_leave1out=True)

batches = st.lists(st.tuples(st.integers(0, 5), st.floats(-10, 10, allow_nan=False, width=32)), min_size=1, max_size=24)


def _slow_leave_one_out(rewards: list[float], groups: list[int]) -> Iterator[float]:
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        yield reward - sum(others) / len(others) if others else 0.0


def _normalized(rewards: list[float], groups: list[int], norm: NormConfig) -> torch.Tensor:
    num_tokens = torch.ones(len(rewards), dtype=torch.int64)
    return normalize(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), num_tokens, norm).float()


@given(batches)
def test_rloo_equals_the_slow_reference_on_ragged_groups(batch: list[tuple[int, float]]) -> None:
    groups, rewards = [g for g, _ in batch], [r for _, r in batch]
    expected = torch.tensor(list(_slow_leave_one_out(rewards, groups)))
    torch.testing.assert_close(_normalized(rewards, groups, RLOO), expected, rtol=1e-5, atol=1e-5)


@given(batches)
def test_rloo_advantages_of_a_group_sum_to_zero(batch: list[tuple[int, float]]) -> None:
    groups, rewards = [g for g, _ in batch], [r for _, r in batch]
    advantages = _normalized(rewards, groups, RLOO)
    for group in set(groups):
        total = sum(float(a) for a, g in zip(advantages, groups, strict=True) if g == group)
        assert total == pytest.approx(0.0, abs=1e-4)


@given(batches, st.integers(-5, 5))
def test_a_constant_added_to_rewards_changes_no_advantage(batch: list[tuple[int, float]], shift: int) -> None:
    groups, rewards = [g for g, _ in batch], [r for _, r in batch]
    shifted = _normalized([r + shift for r in rewards], groups, RLOO)
    torch.testing.assert_close(shifted, _normalized(rewards, groups, RLOO), rtol=1e-4, atol=1e-4)


@given(st.floats(-1e3, 1e3, allow_nan=False), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert torch.count_nonzero(_normalized([reward] * size, [7] * size, RLOO)) == 0


def test_rloo_of_one_correct_in_four_is_the_textbook_value() -> None:
    torch.testing.assert_close(
        _normalized([1, 0, 0, 0], [3, 3, 3, 3], RLOO), torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3])
    )


def test_a_group_of_one_gives_zero_under_leave_one_out() -> None:
    assert _normalized([1.0, 0.0, 1.0], [0, 1, 1], RLOO)[0] == 0


def test_grpo_divides_by_the_unbiased_deviation_of_the_group() -> None:
    norm = NormConfig(mean_level="group", std_level="group", eps=0.0)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(_normalized([1, 0, 0, 1], [0] * 4, norm), (rewards - 0.5) / rewards.std())


def test_without_levels_the_rewards_stay_unchanged() -> None:
    assert _normalized([1.5, -2.0], [0, 1], NormConfig()).tolist() == [1.5, -2.0]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-9, 9, width=32), st.integers(0, 5)), min_size=1, max_size=12))
def test_over_tokens_equals_repeating_each_value_per_token(batch: list[tuple[int, float, int]]) -> None:
    groups, rewards, lengths = (torch.tensor(column) for column in zip(*batch, strict=True))
    norm = NormConfig(mean_level="group", std_level="batch", over="tokens", eps=0.0)
    got = normalize(rewards, groups, lengths, norm)
    tokens = torch.repeat_interleave(rewards.double(), lengths)
    token_groups = torch.repeat_interleave(groups, lengths)
    centred = (
        torch.stack([t - tokens[token_groups == g].mean() for t, g in zip(tokens, token_groups, strict=True)])
        if (len(tokens) > 0)
        else tokens
    )
    if len(centred) > 1 and centred.std() > 1e-6:
        expected = centred / centred.std()
        torch.testing.assert_close(torch.repeat_interleave(got, lengths), expected, rtol=1e-6, atol=1e-6)
    assert bool(torch.isfinite(got).all())


def test_equal_rewards_are_not_scaled() -> None:
    norm = NormConfig(mean_level="none", std_level="batch")
    assert _normalized([2.0, 2.0, 2.0], [0, 0, 1], norm).tolist() == [2.0, 2.0, 2.0]


def test_a_single_group_without_deviation_is_not_scaled() -> None:
    norm = NormConfig(mean_level="none", std_level="group", eps=1e-6)
    assert _normalized([1.0], [0], norm).tolist() == [1.0]


def _slow_normalized(values: list[float], groups: list[int], norm: NormConfig) -> list[float]:
    """Normalize value by value, directly from the definitions in NormConfig."""

    def level(of: int, kind: str) -> list[int]:
        return [i for i in range(len(values)) if kind == "batch" or groups[i] == groups[of]]

    centred = []
    for i, value in enumerate(values):
        members = level(i, norm.mean_level)
        others = [j for j in members if j != i] if norm.mean_leave1out else members
        equal = len({values[j] for j in members}) == 1
        if norm.mean_level == "none":
            centred.append(value)
        else:
            centred.append(0.0 if equal or not others else value - sum(values[j] for j in others) / len(others))
    if norm.std_level == "none":
        return centred
    scaled = []
    for i, value in enumerate(centred):
        members = [centred[j] for j in level(i, norm.std_level)]
        mean = sum(members) / len(members)
        count = max(1, len(members) - norm.std_unbiased)
        deviation = (sum((one - mean) ** 2 for one in members) / count) ** 0.5
        scaled.append(value if len(set(members)) == 1 else value / (deviation + norm.eps))
    return scaled


norms = st.builds(
    NormConfig,
    mean_level=st.sampled_from(["group", "batch", "none"]),
    std_level=st.sampled_from(["group", "batch", "none"]),
    std_unbiased=st.booleans(),
    eps=st.sampled_from([1e-6, 0.1]),
) | st.builds(
    NormConfig,
    mean_level=st.sampled_from(["group", "batch"]),
    mean_leave1out=st.just(True),
    std_level=st.sampled_from(["group", "batch", "none"]),
    std_unbiased=st.booleans(),
)
quarters = st.integers(-20, 20).map(lambda n: n / 4)  # exact in binary, so equal values stay equal


@given(st.lists(st.tuples(st.integers(0, 4), quarters), min_size=1, max_size=16), norms)
def test_every_combination_of_levels_equals_the_slow_reference(
    batch: list[tuple[int, float]], norm: NormConfig
) -> None:
    groups, values = [g for g, _ in batch], [v for _, v in batch]
    got = normalize(torch.tensor(values, dtype=torch.float64), torch.tensor(groups), torch.ones(len(batch)), norm)
    assert got.tolist() == pytest.approx(_slow_normalized(values, groups, norm), rel=1e-6, abs=1e-6)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=8),
    st.builds(
        NormConfig,
        mean_level=st.sampled_from(["group", "batch", "none"]),
        std_level=st.sampled_from(["group", "batch", "none"]),
        std_unbiased=st.booleans(),
        over=st.sampled_from(["trajectories", "tokens"]),
        eps=st.just(0.0),
    ),
    st.booleans(),
)
def test_any_finite_value_gives_a_finite_result(batch: list[tuple[int, float]], norm: NormConfig, masked: bool) -> None:
    """Include eps = 0, groups of one, and no token in the loss."""
    groups, values = torch.tensor([g for g, _ in batch]), torch.tensor([v for _, v in batch], dtype=torch.float64)
    got = normalize(values, groups, torch.full((len(batch),), 0 if masked else 3), norm)
    assert bool(torch.isfinite(got).all())
    assert bool(torch.isfinite(got.float()).all())
