"""Name the half of a run that bounds the throughput, from the shares of the time in which each half waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from areal_rloo.telemetry.records import TrainRecord

WINDOW = 20  # steps that a sentence about a run is about
_SMALL = 0.05  # share of the time
_ALIKE = 1 / 3  # ratio of the shares


class Bound(NamedTuple):
    """The bound (`rollout-bound`, `learner-bound`, `bound by turns`, `balanced`), and the waits that show it."""

    name: str
    waits: str


def bound_by(*, learner_waits: float, rollouts_wait: float) -> Bound:
    """Name the bound from two shares of the time. Halves that both wait take turns, as in synchronous RL."""
    learner, rollouts = (
        f"the learner waits {100 * learner_waits:.0f} %",
        f"the rollouts wait {100 * rollouts_wait:.0f} %",
    )
    both = f"{learner}, {rollouts}"
    if max(learner_waits, rollouts_wait) < _SMALL:
        return Bound("balanced", both)
    if min(learner_waits, rollouts_wait) >= _ALIKE * max(learner_waits, rollouts_wait):
        return Bound("bound by turns", both)
    return Bound("rollout-bound", learner) if learner_waits > rollouts_wait else Bound("learner-bound", rollouts)


def bound_of(records: Sequence[TrainRecord]) -> Bound | None:
    """Name the bound of some steps; None without a step."""
    shares = [(record.idle_share.get("learner", 0.0), record.idle_share.get("rollout", 0.0)) for record in records]
    learner, rollouts = (sum(column) / len(records) for column in zip(*shares, strict=True)) if shares else (0.0, 0.0)
    return bound_by(learner_waits=learner, rollouts_wait=rollouts) if shares else None
