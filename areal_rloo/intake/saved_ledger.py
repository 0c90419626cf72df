"""The ledger in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from areal_rloo.intake.ledger import Ledger, LedgerGroup, Sample
from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.work import Totals
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.messages import Count, GroupId, Reason, SampleIndex, Version

_MOST_REASONS = 128  # ours, and the limited number of those that workers send


class SavedSample(msgspec.Struct, frozen=True):
    """A live sample in a checkpoint. The caller encodes the trajectories of buffered samples."""

    sample_index: SampleIndex
    num_attempts: Count  # without the lease that was running: the end of a learner is no failure of the sample
    buffered: bool
    partial: bytes


Deadline = Annotated[int, Meta(ge=0, lt=2**62)]  # a version plus any `max_staleness`


class SavedGroup(msgspec.Struct, frozen=True):
    """A live group in a checkpoint."""

    group_id: GroupId
    epoch: Count
    item_index: Count
    admission_version: Version
    deadline: Deadline
    samples: Annotated[list[SavedSample], Meta(min_length=1)]


class LedgerState(msgspec.Struct, frozen=True):
    """The ledger in a checkpoint. The numbers have the limits of the wire, over which they go again."""

    admitted_groups: GroupId  # the next group id, too
    dropped_groups: Count
    admitted: Count
    trained: Count
    dropped: Annotated[dict[Reason, Count], Meta(max_length=_MOST_REASONS)]
    dropped_tokens: Annotated[dict[Reason, Count], Meta(max_length=_MOST_REASONS)]
    groups: list[SavedGroup]


def ledger_state(ledger: Ledger) -> LedgerState:
    """Return the present state of a ledger."""
    totals = ledger.totals
    groups = [
        SavedGroup(
            group.group_id,
            group.prompt.epoch,
            group.prompt.item_index,
            group.admission_version,
            group.deadline,
            [SavedSample(i, s.num_attempts, bool(s.trajectories), s.partial) for i, s in group.samples.items()],
        )
        for group in ledger.groups.values()
    ]
    return LedgerState(
        totals.admitted_groups,
        totals.dropped_groups,
        totals.admitted,
        totals.trained,
        dict(totals.dropped),
        dict(totals.dropped_tokens),
        groups,
    )


def ledger_of(
    state: LedgerState, prompts: dict[int, Prompt], trajectories: dict[SampleId, tuple[Trajectory, ...]]
) -> Ledger:
    """Restore a ledger, with the prompts of the live groups and the trajectories of the buffered samples.

    Samples in flight wait for a lease.
    """
    groups = []
    for saved in state.groups:
        name = saved.group_id
        samples = {
            sample.sample_index: Sample(
                num_attempts=sample.num_attempts,
                trajectories=trajectories[(name, sample.sample_index)] if sample.buffered else (),
                partial=sample.partial,
            )
            for sample in saved.samples
        }
        groups.append(LedgerGroup(name, prompts[name], saved.admission_version, saved.deadline, samples))
    totals = Totals(
        admitted_groups=state.admitted_groups,
        dropped_groups=state.dropped_groups,
        admitted=state.admitted,
        trained=state.trained,
        dropped=Counter(state.dropped),
        dropped_tokens=Counter(state.dropped_tokens),
    )
    return Ledger(groups, totals)


def by_sample(trajectories: Iterable[Trajectory]) -> dict[SampleId, tuple[Trajectory, ...]]:
    """Map each sample to the trajectories of the sample, in order."""
    samples: dict[SampleId, list[Trajectory]] = {}
    for trajectory in trajectories:
        samples.setdefault(trajectory.sample_id, []).append(trajectory)
    return {sample_id: tuple(made) for sample_id, made in samples.items()}
