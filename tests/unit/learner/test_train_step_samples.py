"""A train step on samples of several trajectories: a sample counts once, and its trajectories stay together."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.train_steps import (
    assert_same_gradient,
    masks_of,
    ragged_groups,
    replaced,
    spied_step,
    step_config,
)

from areal_rloo.learner.advantages import Samples, compute_advantages
from areal_rloo.trajectory import Completion, Group, SampleId, Trajectory


def _doubled(groups: list[Group]) -> list[Group]:
    """Every second sample has its trajectory twice."""
    return [
        msgspec.structs.replace(
            group,
            trajectories=tuple(t for each in group.trajectories for t in [each] * (1 + each.sample_index % 2)),
        )
        for group in groups
    ]


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("preset", ["rloo_areal", "rloo_trl"])
def test_a_doubled_trajectory_changes_no_mean_over_samples(
    tiny_folders: dict[str, Path], preset: str, num_minibatches: int
) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()
    config = step_config(
        f"algorithm.preset={preset}", "algorithm.kl.coefficient=0", f"learner.num_minibatches={num_minibatches}"
    )
    expected, _ = spied_step(folder, groups, config)
    got, _ = spied_step(folder, _doubled(groups), config)
    assert len(got) == num_minibatches
    assert_same_gradient(got[0], expected[0])


def _split(groups: list[Group], reason: str) -> list[Group]:
    """Every second sample has another, short trajectory before its own, which ended for this reason."""

    def of(each: Trajectory) -> list[Trajectory]:
        whole = each.completion
        short = Completion(whole.tokens[:1], whole.behaviour_logprobs[:1], whole.versions[:1], reason)  # type: ignore[arg-type]
        return [msgspec.structs.replace(each, completion=short), each] if each.sample_index % 2 else [each]

    return [
        msgspec.structs.replace(group, trajectories=tuple(t for each in group.trajectories for t in of(each)))
        for group in groups
    ]


def test_a_sample_is_truncated_if_one_of_its_trajectories_is(tiny_folders: dict[str, Path]) -> None:
    config = step_config("algorithm.rewards.truncated_penalty=0.5")
    (gradient,), _ = spied_step(tiny_folders["qwen2"], _split(ragged_groups(), "length"), config)

    def fined(t: Trajectory) -> Trajectory:
        return msgspec.structs.replace(t, reward=t.reward - 0.5 * (t.sample_index % 2))

    expected_of = replaced(_split(ragged_groups(), "stop"), fined)
    (expected,), _ = spied_step(tiny_folders["qwen2"], expected_of, config)
    assert_same_gradient(gradient, expected)


@pytest.mark.parametrize("penalty", ["truncated_penalty=1.0", "missing_eos_penalty=1.0", "overlong_tokens=90"])
def test_penalties_do_not_depend_on_the_order_of_trajectories(penalty: str) -> None:
    trajectories = [t for group in replaced(_split(ragged_groups(), "length"), _ended_by_7) for t in group.trajectories]
    got = _of_samples(trajectories, f"algorithm.rewards.{penalty}")
    assert got == pytest.approx(_of_samples(trajectories[::-1], f"algorithm.rewards.{penalty}"))
    assert got != pytest.approx(_of_samples(trajectories))


def _ended_by_7(trajectory: Trajectory) -> Trajectory:
    """Only the short trajectories of `_split` do not end."""
    tokens = np.full_like(trajectory.completion.tokens, 3)
    tokens[-1] = 7 if trajectory.completion.finish_reason == "stop" else 3
    return msgspec.structs.replace(trajectory, completion=msgspec.structs.replace(trajectory.completion, tokens=tokens))


def _of_samples(trajectories: list[Trajectory], *overrides: str) -> dict[SampleId, float]:
    """Return the advantage of each sample."""
    advantages = compute_advantages(
        Samples(trajectories),
        masks_of([torch.ones(len(t.completion.tokens), dtype=torch.bool) for t in trajectories]),
        [],
        config=step_config(*overrides),
        kl_coefficient=0.0,
        stop_token_ids=frozenset([7]),
    )
    return {t.sample_id: float(values[0]) for t, values in zip(trajectories, advantages.of_tokens, strict=True)}


def test_a_masked_sample_has_no_token_in_the_loss(tiny_folders: dict[str, Path]) -> None:
    config = step_config("algorithm.rewards.mask_truncated=true")
    groups = _split(ragged_groups(), "length")
    _, result = spied_step(tiny_folders["qwen2"], groups, config)
    trajectories = [t for group in groups for t in group.trajectories]
    for trajectory, mask in zip(trajectories, result.masks.of_tokens, strict=True):
        assert not (trajectory.sample_index % 2 and mask.any())
    assert result.masks.num_truncated > 0 < result.masks.num_tokens
