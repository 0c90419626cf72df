"""The numbers of a batch and of a step in a record, against values by hand."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.train_steps import VERSION, ragged_groups, spied_step, step_config

from areal_rloo.algorithm.diagnostics import describe_tokens
from areal_rloo.learner.advantages import Samples, compute_advantages, loss_masks
from areal_rloo.learner.reporting import batch_numbers
from areal_rloo.telemetry.records import TrainRecord
from areal_rloo.telemetry.words import Words
from areal_rloo.trajectory import Completion, Group, Trajectory


def _group(group_id: int, *rewards: float, num: int = 2, reason: str = "stop") -> Group:
    completion = Completion(np.arange(num), np.zeros(num, np.float32), np.zeros(num, np.int32), reason)  # type: ignore[arg-type]
    made = [Trajectory(group_id, index, np.array([1]), completion, reward) for index, reward in enumerate(rewards)]
    return Group(group_id, 1, tuple(made))


def test_batch_numbers_are_of_rewards_lengths_and_endings() -> None:
    batch = [_group(0, *range(8)), _group(1, 8.0, 9.0, 10.0, num=6, reason="length"), _group(2, 3.0, 3.0, num=2)]
    got = batch_numbers(batch)
    rewards = [*range(11), 3.0, 3.0]
    assert got["reward_mean"] == pytest.approx(np.mean(rewards))
    assert got["reward_std"] == pytest.approx(np.std(rewards))
    assert got["reward_lower_decile"] == pytest.approx(np.quantile(rewards, 0.1))
    assert got["reward_median"] == 4.0
    assert got["reward_upper_decile"] == pytest.approx(np.quantile(rewards, 0.9))
    assert got["zero_variance_group_share"] == pytest.approx(1 / 3)
    assert (got["completion_tokens_mean"], got["completion_tokens_max"]) == (pytest.approx((10 * 2 + 3 * 6) / 13), 6)
    assert got["truncated_share"] == pytest.approx(3 / 13)


def test_a_trajectory_spans_if_several_versions_sampled_it() -> None:
    made = []
    for index, versions in enumerate([[3, 3], [3, 4], [3, 4, 4, 7], [5]]):
        num = len(versions)
        completion = Completion(np.arange(num), np.zeros(num, np.float32), np.array(versions, np.int32), "stop")
        made.append(Trajectory(0, index, np.array([1]), completion, 1.0))
    assert batch_numbers([Group(0, 1, tuple(made))])["spanning_share"] == 0.5


def test_token_shares_are_of_all_completion_tokens() -> None:
    got = describe_tokens({0: 35, 2: 35}, 20, 10)
    assert got["trained_tokens"] == 70
    assert (got["masked_token_share"], got["truncated_token_share"]) == (0.2, 0.1)
    assert (got["staleness_mean"], got["staleness_max"]) == (1.0, 2)
    assert describe_tokens({}, 0, 0)["masked_token_share"] == 0.0


@pytest.mark.parametrize("overrides", [(), ("algorithm.preset=reinforce_plus_plus", "algorithm.kl.coefficient=0")])
def test_advantage_numbers_are_those_of_the_tokens_in_the_loss(overrides: Sequence[str]) -> None:
    config = step_config(*overrides, "algorithm.max_staleness=2")
    samples = Samples([trajectory for group in ragged_groups() for trajectory in group.trajectories])
    masks = loss_masks(samples, policy_version=VERSION, config=config.algorithm)
    got = compute_advantages(samples, masks, [], config=config, kl_coefficient=0.0, stop_token_ids=frozenset())
    one_by_one = [
        value
        for mask, values in zip(masks.of_tokens, got.of_tokens, strict=True)
        for value, counts in zip(values.tolist(), mask.tolist(), strict=True)
        if counts
    ]
    assert 0 < len(one_by_one) < sum(len(mask) for mask in masks.of_tokens)
    assert got.numbers["advantage_mean"] == pytest.approx(np.mean(one_by_one), abs=1e-12)
    assert got.numbers["advantage_std"] == pytest.approx(np.std(one_by_one))
    assert got.numbers["advantage_abs_mean"] == pytest.approx(np.mean(np.abs(one_by_one)))
    assert (got.numbers["advantage_min"], got.numbers["advantage_max"]) == (min(one_by_one), max(one_by_one))
    assert masks.num_in_loss.tolist() == [int(mask.sum()) for mask in masks.of_tokens]
    assert got.any_of_tokens == [bool(values.any()) for values in got.of_tokens]


def test_batch_step_and_loop_give_each_field_of_a_record_once(tiny_folders: dict[str, Path]) -> None:
    _, result = spied_step(tiny_folders["qwen2"], ragged_groups(), step_config())
    of_the_batch = batch_numbers([_group(0, 1.0)])
    given = {*of_the_batch, *result.numbers, *result.measured}
    assert len(given) == len(of_the_batch) + len(result.numbers) + len(result.measured)
    of_the_loop = {
        *("num_train_steps", "policy_version", "wall_s", "skipped_steps", "failed_checkpoints", "wait_s"),
        *("learner_idle_s", "rollout_idle_s", "generated_tokens", "generated_tokens_per_s", "trained_tokens_per_s"),
        *(
            "num_workers",
            "weights_behind",
            "ledger",
            "filtered_prompts",
            "epoch",
            "truncated_prompts",
            "idle_share",
            "rollout_busy_s",
            "decoding_s",
            "steps_since_start",
        ),
    }
    assert given | of_the_loop == {field.name for field in msgspec.structs.fields(TrainRecord)}
    assert not given & of_the_loop


def test_names_of_reward_parts_are_limited_over_a_run() -> None:
    words = Words(2)
    for number in range(5):
        (trajectory,) = _group(0, 1.0).trajectories
        parts = {f"part {number}": float(number), "common": 2.0}
        group = Group(0, 1, (msgspec.structs.replace(trajectory, reward_parts=parts),))
        numbers = batch_numbers([group], label=words.label)
    assert numbers["reward_parts"] == {"other": 4.0, "common": 2.0}
