"""The name of the half that bounds the throughput."""

from collections.abc import Callable

import pytest

from areal_rloo.telemetry.bound import bound_by, bound_of, shares_of
from areal_rloo.telemetry.records import TrainRecord


@pytest.mark.parametrize(
    ("learner", "rollouts", "words"),
    [
        (0.31, 0.02, "rollout-bound: the learner waits 31 %"),
        (0.0, 0.4, "learner-bound: the rollouts wait 40 %"),
        (0.01, 0.04, "balanced: the learner waits 1 %, the rollouts wait 4 %"),
        (0.55, 0.41, "in lockstep: the learner waits 55 %, the rollouts wait 41 %"),
        (0.9, 0.9, "reward-bound: the learner waits 90 %, the rollouts wait 90 %"),
    ],
)
def test_the_half_that_waits_less_is_the_bound(learner: float, rollouts: float, words: str) -> None:
    assert ": ".join(bound_by(learner_waits=learner, rollouts_wait=rollouts)) == words


def test_steps_have_the_bound_of_their_waits_over_their_time(make_train_record: Callable[..., TrainRecord]) -> None:
    """A long step counts more than a short one, as in the sentence at the end of a run."""
    times = [(100.0, 7.0), (101.0, 7.9), (110.0, 11.0)]
    records = [make_train_record(wall_s=wall_s, learner_idle_s=idle_s, rollout_idle_s=0.0) for wall_s, idle_s in times]
    assert shares_of(records) == (0.4, 0.0)
    assert bound_of(records) == ("rollout-bound", "the learner waits 40 %")
    assert bound_of(records[:2]) is bound_of([]) is None
