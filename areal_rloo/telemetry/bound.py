"""Name the half of a run that bounds the throughput, from the shares of the time in which each half waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from areal_rloo.telemetry.records import TrainRecord

WINDOW = 20  # steps that a sentence about a run is about
_LEAST_RECORDS = 3  # a single step says little
_SMALL = 0.05  # share of the time
_ALIKE = 1 / 3  # ratio of the shares
_AT_ONCE = 1.2  # sum of the shares: halves that wait for each other wait in turn, so for at most 1 together


class Bound(NamedTuple):
    """The bound, and the waits that show it: `rollout-bound`, `learner-bound`, `in lockstep`, `balanced`.

    Also `reward-bound`: both halves wait at the same time, so for a third: rewards, tools, or agents.
    """

    name: str
    waits: str


def bound_by(*, learner_waits: float, rollouts_wait: float, has_rewards: bool = True) -> Bound:
    """Name the bound from two shares of the time. Halves that both wait are in lockstep, as in synchronous RL.

    `has_rewards`: False for a forecast, which knows no rewards.
    """
    learner, rollouts = (
        f"the learner waits {100 * learner_waits:.0f} %",
        f"the rollouts wait {100 * rollouts_wait:.0f} %",
    )
    both = f"{learner}, {rollouts}"
    if max(learner_waits, rollouts_wait) < _SMALL:
        return Bound("balanced", both)
    if has_rewards and learner_waits + rollouts_wait > _AT_ONCE:
        return Bound("reward-bound", both)
    if min(learner_waits, rollouts_wait) >= _ALIKE * max(learner_waits, rollouts_wait):
        return Bound("in lockstep", both)
    return Bound("rollout-bound", learner) if learner_waits > rollouts_wait else Bound("learner-bound", rollouts)


def shares_of(records: Sequence[TrainRecord]) -> tuple[float, float]:
    """Return the shares of the time from the first record to the last in which the learner and the rollouts waited."""
    first, last = records[0], records[-1]
    seconds = last.wall_s - first.wall_s
    waits_s = (last.learner_idle_s - first.learner_idle_s, last.rollout_idle_s - first.rollout_idle_s)
    learner, rollouts = (min(1.0, max(0.0, wait_s / seconds)) if seconds > 0 else 0.0 for wait_s in waits_s)
    return learner, rollouts


def bound_of(records: Sequence[TrainRecord]) -> Bound | None:
    """Name the bound of the steps after the first record, which waits for the start; None if there are too few."""
    if len(records) < _LEAST_RECORDS:
        return None
    learner, rollouts = shares_of(records)
    return bound_by(learner_waits=learner, rollouts_wait=rollouts)
