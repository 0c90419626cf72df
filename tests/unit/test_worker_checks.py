"""What an episode of the user's may give: trajectories of its sample, all with one finite reward."""

import numpy as np
import pytest

from areal_rloo.errors import EpisodeError
from areal_rloo.rollout.episode import Sample
from areal_rloo.rollout.worker import check_trajectories
from areal_rloo.trajectory import Completion, Item, Trajectory

SAMPLE = Sample((3, 1), "train", Item("?"), (5,))


def _trajectory(reward: float = 1.0, *, sample_index: int = 1, num_tokens: int = 2) -> Trajectory:
    arrays = (np.ones(num_tokens, np.int32), np.zeros(num_tokens, np.float32), np.ones(num_tokens, np.int32))
    return Trajectory(3, sample_index, np.array([5], np.int32), Completion(*arrays, "stop"), reward)


def test_one_or_several_with_the_same_reward_are_fine() -> None:
    check_trajectories(SAMPLE, [_trajectory()])
    check_trajectories(SAMPLE, [_trajectory(), _trajectory()])


@pytest.mark.parametrize(
    ("trajectories", "words"),
    [
        ([], "expected at least one trajectory, got none"),
        ([_trajectory(sample_index=2)], r"expected trajectories of sample \(3, 1\), got one of \(3, 2\)"),
        ([_trajectory(num_tokens=0)], "a completion of at least one token"),
        ([_trajectory(1.0), _trajectory(0.5)], r"expected one finite reward for all trajectories, got \[1.0, 0.5\]"),
        ([_trajectory(float("nan"))], "expected one finite reward"),
    ],
)
def test_anything_else_drops_the_sample_with_what_is_wrong(trajectories: list[Trajectory], words: str) -> None:
    with pytest.raises(EpisodeError, match=words):
        check_trajectories(SAMPLE, trajectories)
