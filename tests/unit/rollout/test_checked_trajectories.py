"""The trajectories that a user's episode may return: all of the sample, with the same finite reward."""

from typing import Any

import msgspec
import numpy as np
import pytest

from areal_rloo.errors import EpisodeError
from areal_rloo.rollout.deadline import checked_trajectories
from areal_rloo.rollout.episode import Sample
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.codec import encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Finished, Results

SAMPLE = Sample((3, 1), "train", Item("?"), (5,))


def _trajectory(reward: float = 1.0, *, sample_index: int = 1, num_tokens: int = 2) -> Trajectory:
    arrays = (np.ones(num_tokens, np.int32), np.zeros(num_tokens, np.float32), np.ones(num_tokens, np.int32))
    return Trajectory(3, sample_index, np.array([5], np.int32), Completion(*arrays, "stop"), reward)


def _changed(**changes: object) -> Trajectory:
    return msgspec.structs.replace(_trajectory(), **changes)


def test_numpy_rewards_become_python_floats() -> None:
    (checked,), num_bytes = checked_trajectories(
        SAMPLE, [_changed(reward=np.float64(0.5), reward_parts={"a": np.float32(1)})], Limits()
    )
    assert (type(checked.reward), checked.reward, checked.reward_parts) == (float, 0.5, {"a": 1.0})
    assert num_bytes >= sum(map(len, encode(Results("learner", 1, (Finished(1, (checked,)),)))))


def test_the_values_of_a_dict_are_trajectories() -> None:
    values: Any = {"first": _trajectory(), "second": _trajectory()}.values()
    assert len(checked_trajectories(SAMPLE, values, Limits())[0]) == 2


def test_one_or_more_trajectories_with_the_same_reward_are_accepted() -> None:
    for num in (1, 2):
        checked, _ = checked_trajectories(SAMPLE, [_trajectory()] * num, Limits())
        assert [(trajectory.sample_id, trajectory.reward) for trajectory in checked] == [((3, 1), 1.0)] * num


@pytest.mark.parametrize(
    ("trajectories", "words"),
    [
        (_trajectory(), "expected a list of trajectories, got Trajectory"),
        (None, "expected a list of trajectories, got NoneType"),
        ("hello", "expected a list of trajectories, got str"),
        ([_trajectory(), "hello"], "expected trajectories, got str"),
        ({}, "expected at least one trajectory, got none"),
        ({"a": _trajectory()}, "expected trajectories, got str"),
        ([], "expected at least one trajectory, got none"),
        ([_trajectory(sample_index=2)], r"expected trajectories of sample \(3, 1\), got one of \(3, 2\)"),
        ([_trajectory(num_tokens=0)], "num_tokens: expected 1 to"),
        ([_trajectory(1.0), _trajectory(0.5)], r"expected one reward for all trajectories, got \[1.0, 0.5\]"),
        ([_trajectory(float("nan"))], "reward: expected a number up to"),
        ([_changed(reward_parts={"a": float("inf")})], "reward_parts: expected numbers up to"),
        ([_changed(reward="much")], "can be sent: could not convert string to float"),
        ([_changed(token_rewards=np.zeros(3, np.float32))], r"token_rewards: expected shape \[2\], got \[3\]"),
        ([_changed(answer=object())], "can be sent"),
        ([_changed(completion="text")], "can be sent"),
    ],
)
def test_wrong_trajectories_drop_the_sample_with_the_reason(trajectories: Any, words: str) -> None:
    with pytest.raises(EpisodeError, match=words):
        checked_trajectories(SAMPLE, trajectories, Limits())


def test_more_trajectories_than_the_option_allows_drop_the_sample() -> None:
    limits = Limits(max_trajectories=2)
    assert len(checked_trajectories(SAMPLE, [_trajectory()] * 2, limits)[0]) == 2
    with pytest.raises(EpisodeError, match=r"at most rollout\.episode\.max_trajectories=2 trajectories, got 3"):
        checked_trajectories(SAMPLE, [_trajectory()] * 3, limits)
