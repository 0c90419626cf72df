"""Properties of every preset: from trajectories to the advantage of each token."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.train_steps import masks_of
from torch import Tensor

from areal_rloo.config import PRESETS, Config, load_config
from areal_rloo.learner.advantages import Samples, compute_advantages
from areal_rloo.trajectory import Completion, Trajectory

EOS = 1
CENTRES_BY_GROUP = [
    name
    for name, preset in PRESETS.items()
    if "group" in (preset["adv_norm"]["mean_level"], preset["reward_norm"]["mean_level"])
]


def _trajectory(group: int, index: int, num: int, reward: float, *, truncated: bool = False) -> Trajectory:
    tokens = np.full(num, 7, np.int32)
    if not truncated:
        tokens[-1] = EOS
    logprobs = -np.linspace(0.1, 2.0, num).astype(np.float32)
    reason = "length" if truncated else "stop"
    completion = Completion(tokens, logprobs, np.zeros(num, np.int32), reason)  # type: ignore[arg-type]
    return Trajectory(group, index, np.array([3], np.int32), completion, reward)


def _advantages(
    trajectories: list[Trajectory],
    *overrides: str,
    masks: list[Tensor] | None = None,
    reference: list[Tensor] | None = None,
    config: Config | None = None,
) -> list[Tensor]:
    config = config or load_config("quickstart.yaml", overrides)
    return compute_advantages(
        Samples(trajectories),
        masks_of(masks or [torch.ones(len(t.completion.tokens), dtype=torch.bool) for t in trajectories]),
        reference or (),
        config=config,
        kl_coefficient=config.algorithm.kl.coefficient,
        stop_token_ids=frozenset({EOS}),
    ).of_tokens


def _batch(seed: int = 0) -> list[Trajectory]:
    """Make ragged, interleaved groups; group 2 has equal rewards."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(14):
        group = int(rng.integers(0, 4))
        reward = 0.25 if group == 2 else float(rng.normal())
        made.append(_trajectory(group, index, int(rng.integers(1, 9)), reward))
    made += [_trajectory(2, 90, 5, 0.25), _trajectory(2, 91, 1, 0.25)]
    return made


def test_most_presets_centre_by_group() -> None:
    assert set(PRESETS) - set(CENTRES_BY_GROUP) == {"reinforce", "reinforce_plus_plus"}


@pytest.mark.parametrize("preset", CENTRES_BY_GROUP)
def test_equal_rewards_of_a_group_give_exactly_zero_advantages(preset: str) -> None:
    batch = _batch()
    advantages = _advantages(batch, f"algorithm.preset={preset}")
    for trajectory, own in zip(batch, advantages, strict=True):
        assert (torch.count_nonzero(own) == 0) == (trajectory.group_id == 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_order_of_trajectories_changes_nothing(preset: str) -> None:
    batch = _batch(1)
    shuffled = random.Random(0).sample(list(enumerate(batch)), len(batch))
    expected = _advantages(batch, f"algorithm.preset={preset}")
    got = _advantages([trajectory for _, trajectory in shuffled], f"algorithm.preset={preset}")
    for (index, _), own in zip(shuffled, got, strict=True):
        torch.testing.assert_close(own, expected[index], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("preset", [name for name in CENTRES_BY_GROUP if PRESETS[name]["adv_norm"]["mean_leave1out"]])
def test_rloo_advantages_sum_to_zero_and_ignore_a_constant(preset: str) -> None:
    batch = _batch(2)
    higher = [_trajectory(t.group_id, t.sample_index, len(t.completion.tokens), t.reward + 10) for t in batch]
    advantages = _advantages(batch, f"algorithm.preset={preset}")
    for own, shifted in zip(advantages, _advantages(higher, f"algorithm.preset={preset}"), strict=True):
        torch.testing.assert_close(own, shifted, rtol=1e-5, atol=1e-5)
    for group in {t.group_id for t in batch}:
        scalars = [float(a[0]) for t, a in zip(batch, advantages, strict=True) if t.group_id == group]
        assert sum(scalars) == pytest.approx(0.0, abs=1e-5)


def test_reinforce_pp_baseline_scales_over_tokens_and_centres_once() -> None:
    """verl subtracts the mean over tokens again, which moves groups of equal rewards away from 0. The paper
    (arXiv:2501.03262) subtracts a mean over trajectories, which is 0 after the first centring."""
    batch = [_trajectory(0, 0, 1, 1.0), _trajectory(0, 1, 3, 0.0), _trajectory(1, 0, 4, 1.0), _trajectory(1, 1, 2, 1.0)]
    got = _advantages(batch, "algorithm.preset=reinforce_plus_plus_baseline", "algorithm.kl.coefficient=0")
    tokens = torch.tensor([0.5, -0.5, -0.5, -0.5, *[0.0] * 6], dtype=torch.float64)
    expected = [0.5 / tokens.std(), -0.5 / tokens.std(), 0.0, 0.0]
    for own, value in zip(got, expected, strict=True):
        assert own.tolist() == pytest.approx([float(value)] * len(own), rel=1e-6)


def test_reinforce_pp_whitens_token_returns_minus_kl() -> None:
    batch = [_trajectory(0, 0, 3, 1.0), _trajectory(0, 1, 2, 0.0), _trajectory(1, 0, 1, 0.5)]
    reference = [torch.tensor([-0.3, -1.0, -1.5]), torch.tensor([-0.5, -0.2]), torch.tensor([-3.0])]
    config = load_config(
        "quickstart.yaml",
        [
            "algorithm.preset=reinforce_plus_plus",
            "algorithm.kl.coefficient=0.1",
            "algorithm.discount=0.9",
            "algorithm.adv_norm.eps=0",
        ],
    )
    returns = []
    for trajectory, logprobs in zip(batch, reference, strict=True):
        behaviour = trajectory.completion.behaviour_logprobs.tolist()
        rewards = [-0.1 * (b - r) for b, r in zip(behaviour, logprobs.tolist(), strict=True)]
        rewards[-1] += trajectory.reward
        num = len(rewards)
        returns.append([sum(0.9 ** (s - t) * rewards[s] for s in range(t, num)) for t in range(num)])
    everything = torch.tensor([value for own in returns for value in own], dtype=torch.float64)
    got = _advantages(batch, reference=reference, config=config)
    expected = ((everything - everything.mean()) / everything.std()).float()
    torch.testing.assert_close(torch.cat(got), expected)


def test_masked_tokens_do_not_count_in_a_norm_over_tokens() -> None:
    batch = [_trajectory(0, 0, 3, 1.0), _trajectory(0, 1, 2, 0.0)]
    masks = [torch.tensor([True, False, False]), torch.tensor([True, True])]
    overrides = ("algorithm.preset=reinforce_plus_plus", "algorithm.kl.coefficient=0", "algorithm.adv_norm.eps=0")
    got = _advantages(batch, *overrides, masks=masks)
    inside = torch.tensor([1.0, 0.0, 0.0])
    expected = (inside - inside.mean()) / inside.std()
    torch.testing.assert_close(torch.cat(got)[torch.cat(masks)], expected)


def test_penalties_change_all_advantages_of_a_group() -> None:
    batch = [_trajectory(0, 0, 4, 1.0, truncated=True), _trajectory(0, 1, 4, 1.0), _trajectory(0, 2, 4, 0.0)]
    got = _advantages(batch, "algorithm.rewards.truncated_penalty=0.5", "algorithm.rewards.missing_eos_penalty=0.25")
    rewards = [0.25, 1.0, 0.0]
    expected = [r - (sum(rewards) - r) / 2 for r in rewards]
    assert [float(own[0]) for own in got] == pytest.approx(expected)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(allow_nan=False, allow_infinity=False)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(list(PRESETS)),
    st.booleans(),
    st.floats(-1e4, 0.0),
)
def test_finite_inputs_give_finite_advantages_in_every_preset(
    rows: list[tuple[int, int, float]], preset: str, masked: bool, reference_logprob: float
) -> None:
    """Covers groups of one, empty masks, the largest float rewards, and logprobs of -1e4."""
    batch = [_trajectory(group, index, num, reward) for index, (group, num, reward) in enumerate(rows)]
    config = load_config("quickstart.yaml", [f"algorithm.preset={preset}"])
    reference = [torch.full((num,), reference_logprob) for _, num, _ in rows]
    advantages = _advantages(
        batch,
        masks=[torch.full((num,), not masked) for _, num, _ in rows],
        reference=reference if config.algorithm.kl.placement == "reward" else None,
        config=config,
    )
    assert all(bool(torch.isfinite(own).all()) for own in advantages)


def test_rewards_are_normed_before_they_become_returns_of_tokens() -> None:
    batch = [_trajectory(0, 0, 3, 1.0), _trajectory(0, 1, 2, 0.0)]
    none = "algorithm.adv_norm={mean_level: none, mean_leave1out: false, std_level: none}"
    got = _advantages(batch, "algorithm.returns=token", "algorithm.reward_norm.mean_level=group", none)
    assert [own.tolist() for own in got] == [[0.5] * 3, [-0.5] * 2]
