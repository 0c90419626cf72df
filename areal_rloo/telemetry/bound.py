"""Name the half of a run that bounds the throughput, from the shares of the time in which each half waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from areal_rloo.telemetry.records import TrainRecord

WINDOW = 20  # steps that a sentence about a run is about
_LEAST_RECORDS = 3  # a single step says little
_SMALL = 0.05  # share of the time
_ALIKE = 1 / 3  # ratio of the shares
_AT_ONCE = 1.2  # sum of the shares: halves that wait for each other wait in turn, so for at most 1 together


class _WorkerTimes(Protocol):
    @property
    def rollout_idle_s(self) -> float: ...

    @property
    def rollout_busy_s(self) -> float: ...


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


def newest(records: Sequence[TrainRecord], number: int = WINDOW + 1) -> list[TrainRecord]:
    """Return the last records, but none of before the last start of the learner."""
    last = records[-1:]
    started = last[0].num_train_steps - last[0].steps_since_start if last else 0
    return [record for record in records[-number:] if record.num_train_steps > started]


def idle_share(now: _WorkerTimes, before: _WorkerTimes, *, unknown: float = 0.0) -> float:
    """Return the share of the workers' time in which they decoded nothing; `unknown` if they report no time.

    Of the times that the workers report, so their number may change meanwhile.
    """
    idle_s, busy_s = now.rollout_idle_s - before.rollout_idle_s, now.rollout_busy_s - before.rollout_busy_s
    return idle_s / (idle_s + busy_s) if idle_s >= 0 and busy_s >= 0 and idle_s + busy_s > 0 else unknown


def shares_of(records: Sequence[TrainRecord]) -> tuple[float, float]:
    """Return the shares of the time from the first record to the last in which the learner and the rollouts waited."""
    first, last = records[0], records[-1]
    seconds, wait_s = last.wall_s - first.wall_s, last.learner_idle_s - first.learner_idle_s
    return min(1.0, max(0.0, wait_s / seconds)) if seconds > 0 else 0.0, idle_share(last, first)


def bound_of(records: Sequence[TrainRecord]) -> Bound | None:
    """Name the bound of the newest steps but the first, which waits for the start; None if there are too few."""
    recent = newest(records)
    if len(recent) < _LEAST_RECORDS:
        return None
    learner, rollouts = shares_of(recent)
    return bound_by(learner_waits=learner, rollouts_wait=rollouts)
