"""The name of the half that bounds the throughput."""

from collections.abc import Callable

import pytest

from areal_rloo.telemetry.bound import bound_by, bound_of
from areal_rloo.telemetry.records import TrainRecord


@pytest.mark.parametrize(
    ("learner", "rollouts", "words"),
    [
        (0.31, 0.02, "rollout-bound: the learner waits 31 %"),
        (0.0, 0.4, "learner-bound: the rollouts wait 40 %"),
        (0.01, 0.04, "balanced: the learner waits 1 %, the rollouts wait 4 %"),
        (0.55, 0.41, "bound by turns: the learner waits 55 %, the rollouts wait 41 %"),
    ],
)
def test_the_half_that_waits_less_is_the_bound(learner: float, rollouts: float, words: str) -> None:
    assert ": ".join(bound_by(learner_waits=learner, rollouts_wait=rollouts)) == words


def test_steps_have_the_bound_of_their_mean_waits(make_train_record: Callable[..., TrainRecord]) -> None:
    records = [make_train_record(idle_share={"learner": share, "rollout": 0.0}) for share in (0.2, 0.6)]
    assert bound_of(records) == ("rollout-bound", "the learner waits 40 %")
    assert bound_of([]) is None
