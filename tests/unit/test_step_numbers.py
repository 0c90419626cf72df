"""What a record says of a batch and of a step, against values by hand."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from areal_rloo.algorithm.diagnostics import PolicyDiagnostics
from areal_rloo.learner.numbers import batch_numbers, step_numbers
from areal_rloo.learner.train_step import StepResult
from areal_rloo.telemetry.records import TrainRecord
from areal_rloo.trajectory import Completion, Group, Trajectory


def _group(group_id: int, *rewards: float, num: int = 2, reason: str = "stop") -> Group:
    completion = Completion(np.arange(num), np.zeros(num, np.float32), np.zeros(num, np.int32), reason)  # type: ignore[arg-type]
    made = [Trajectory(group_id, index, np.array([1]), completion, reward) for index, reward in enumerate(rewards)]
    return Group(group_id, 1, tuple(made))


def test_rewards_lengths_and_endings_of_a_batch() -> None:
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


def test_a_trajectory_spans_versions_where_several_sampled_its_tokens() -> None:
    made = []
    for index, versions in enumerate([[3, 3], [3, 4], [3, 4, 4, 7], [5]]):
        num = len(versions)
        completion = Completion(np.arange(num), np.zeros(num, np.float32), np.array(versions, np.int32), "stop")
        made.append(Trajectory(0, index, np.array([1]), completion, 1.0))
    assert batch_numbers([Group(0, 1, tuple(made))])["spanning_share"] == 0.5


def test_shares_of_a_step_are_of_all_its_completion_tokens() -> None:
    result = StepResult(
        train_step_s=2.0,
        num_tokens=70,
        num_stale_tokens=20,
        num_truncated_tokens=10,
        staleness_tokens=Counter({0: 35, 2: 35}),
    )
    got = step_numbers(result)
    assert (got["masked_token_share"], got["truncated_token_share"]) == (0.2, 0.1)
    assert (got["staleness_mean"], got["staleness_max"]) == (1.0, 2)
    assert step_numbers(StepResult())["masked_token_share"] == 0.0


def test_together_with_the_loop_s_own_they_are_all_a_record_has() -> None:
    given = {*batch_numbers([_group(0, 1.0)]), *step_numbers(StepResult(policy=PolicyDiagnostics()))}
    of_the_loop = {
        *("num_train_steps", "policy_version", "wall_s", "skipped_steps", "failed_checkpoints", "wait_s"),
        *("learner_idle_s", "rollout_idle_s", "generated_tokens", "generated_tokens_per_s", "trained_tokens_per_s"),
        *("num_workers", "ledger", "filtered_prompts", "truncated_prompts"),
    }
    assert given | of_the_loop == {field.name for field in msgspec.structs.fields(TrainRecord)}
    assert not given & of_the_loop
