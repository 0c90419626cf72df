"""A train step on shaped rewards, truncated completions and turns with tokens by others."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.train_steps import (
    VERSION,
    another_policy,
    assert_same_gradient,
    is_the_policy_s,
    ragged_groups,
    reference_gradient,
    replaced,
    spied_step,
    step_config,
    with_equal_rewards,
    with_turns,
)

from areal_rloo.config import PRESETS
from areal_rloo.trajectory import Completion, Group, Trajectory


def test_a_step_on_equal_rewards_moves_no_weight(tiny_folders: dict[str, Path]) -> None:
    (gradient,), _ = spied_step(tiny_folders["qwen2"], with_equal_rewards(ragged_groups()), step_config())
    assert all(torch.count_nonzero(g) == 0 for g in gradient.values())


def _truncated_evenly(groups: list[Group]) -> list[Group]:
    """Every second trajectory of a group ended at the token limit."""

    def change(t: Trajectory) -> Trajectory:
        reason = "length" if t.sample_index % 2 else "stop"
        completion = msgspec.structs.replace(t.completion, finish_reason=reason)
        return msgspec.structs.replace(t, completion=completion)

    return replaced(groups, change)


def test_masked_truncated_completions_stay_in_the_group_mean(
    tiny_folders: dict[str, Path],
) -> None:
    """A truncated completion and a completion past the staleness bound both lose all tokens from the loss."""

    def stale(t: Trajectory) -> Trajectory:
        if t.completion.finish_reason != "length":
            return t
        versions = np.full_like(t.completion.versions, -9)
        return msgspec.structs.replace(t, completion=msgspec.structs.replace(t.completion, versions=versions))

    folder, groups = tiny_folders["qwen2"], _truncated_evenly(ragged_groups())
    (masked,), result = spied_step(folder, groups, step_config("algorithm.rewards.mask_truncated=true"))
    (expected,), without = spied_step(folder, replaced(groups, stale), step_config())
    assert_same_gradient(masked, expected)
    assert result.masks.num_truncated > 0
    assert result.masks.num_tokens == without.masks.num_tokens
    assert sum(result.masks.staleness_tokens.values()) == result.masks.num_tokens


def test_a_shaped_reward_equals_the_same_reward_from_the_task(tiny_folders: dict[str, Path]) -> None:
    folder, groups = tiny_folders["qwen2"], _truncated_evenly(ragged_groups())
    config = step_config("algorithm.rewards.truncated_penalty=0.5", "algorithm.rewards.scale=2")
    (gradient,), _ = spied_step(folder, groups, config)

    def given(t: Trajectory) -> Trajectory:
        penalty = 0.5 * (t.completion.finish_reason == "length")
        return msgspec.structs.replace(t, reward=2 * (t.reward - penalty))

    (expected,), _ = spied_step(folder, replaced(groups, given), step_config())
    assert_same_gradient(gradient, expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_extreme_logprobs_and_rewards_give_a_finite_step(tiny_folders: dict[str, Path], preset: str) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()
    for index, trajectory in enumerate(t for group in groups for t in group.trajectories):
        trajectory.completion.behaviour_logprobs[::2] = -1e4 if index % 2 else -0.0
    groups = replaced(groups, lambda t: msgspec.structs.replace(t, reward=t.reward * 1e300))
    config = step_config(f"algorithm.preset={preset}")
    frozen = another_policy(folder) if config.algorithm.kl.coefficient > 0 else None
    (gradient,), result = spied_step(folder, groups, config, frozen)
    assert all(bool(torch.isfinite(g).all()) for g in gradient.values())
    assert result.updates.num_optimizer_steps == 1
    assert result.numbers["num_limited_rewards"] == sum(len(group.trajectories) for group in groups)


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_tool_tokens_have_no_gradient_and_a_sample_counts_once(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    config, groups = step_config(f"learner.microbatch_tokens={microbatch_tokens}"), with_turns(ragged_groups())
    (gradient,), result = spied_step(tiny_folders["qwen2"], groups, config)
    assert_same_gradient(gradient, reference_gradient(tiny_folders["qwen2"], groups, config))
    counted = [
        sum(is_the_policy_s(t.completion, i) for i in range(len(t.completion.tokens)))
        for group in groups
        for t in group.trajectories
    ]
    assert result.masks.num_tokens + result.masks.num_stale == sum(counted)
    assert [len(mask) for mask in result.masks.of_tokens] == [
        len(t.completion.tokens) for g in groups for t in g.trajectories
    ]


def test_token_rewards_stay_at_their_tokens_and_become_returns(
    tiny_folders: dict[str, Path],
) -> None:
    config = step_config(
        "algorithm.returns=token", "algorithm.discount=0.5", "algorithm.adv_norm.mean_level=none",
        "algorithm.adv_norm.mean_leave1out=false", "algorithm.max_staleness=3",
    )  # fmt: skip
    rewards = np.array([0, 2, 0, 1], np.float32)
    completion = Completion(
        np.array([5, 6, 7, 8], np.int32), np.full(4, -4.5, np.float32), np.full(4, VERSION, np.int32), "stop"
    )
    trajectories = tuple(
        Trajectory(0, index, np.array([3], np.int32), completion, 4.0, {}, given)
        for index, given in enumerate((rewards, None))
    )
    _, result = spied_step(tiny_folders["qwen2"], [Group(0, 9, trajectories)], config)
    # Of the 4 the tokens earned 3; the last token has the other 1. Returns are discounted by half a token.
    assert result.advantages.of_tokens[0].tolist() == [
        0 + 0.5 * (2 + 0.5 * (0 + 0.5 * 2)),
        2 + 0.5 * (0 + 0.5 * 2),
        1.0,
        2.0,
    ]
    assert result.advantages.of_tokens[1].tolist() == [0.5, 1.0, 2.0, 4.0]
