"""The ledger: which worker owes which sample, and the outcome of every sample.

The intake records every event: a group admitted, a sample leased, finished, lost or failed, a group trained or dropped.
At every moment, in samples,

    admitted = trained + dropped(reason) + buffered + in_flight

    waiting ─► leased ─► buffered ─► training ─► trained
       ▲          │          │           │
       └── lost ──┘          └─► dropped ┘       (also from waiting and leased)

A sample in flight waits for a lease or is leased. A sample in training counts as buffered. A method refuses every other
move.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from areal_rloo.intake.prompts import Prompt
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Group, SampleId, Trajectory
from areal_rloo.wire.messages import Count, GroupId, Reason, SampleIndex, Version
from areal_rloo.wire.turns import num_tokens_of, num_written

_MOST_DROPS = 256  # kept for inspection; all are counted
_MOST_REASONS = 128  # in a checkpoint: ours, and the limited number of those that workers send
_MOST_LEASES = 16  # of a sample, remembered to recognize late results


class Grant(NamedTuple):
    """A lease of one sample, as the learner granted it."""

    lease_id: int
    worker_id: str
    min_version: int  # lowest policy version that a token of the answer may have
    continues: bool = False  # from a partial rollout, perhaps of another worker


@dataclass(slots=True)
class Sample:
    """A sample without an outcome: waiting, leased, or (with trajectories) buffered."""

    worker_id: str | None = None  # of the holder; None: waits for a lease, or is buffered
    leases: tuple[Grant, ...] = ()  # the last that were granted, the newest last
    num_attempts: int = 0  # leases lost, perhaps because of the sample
    trajectories: tuple[Trajectory, ...] = ()
    partial: bytes = b""  # what the holders have told of an unfinished sample: bytes of `wire.turns`
    lost_as_attempt: bool = False  # the last lost lease counts in `num_attempts`

    def lease(self, grant: Grant) -> None:
        assert self.worker_id is None and not self.trajectories, f"lease {grant.lease_id}: the sample is not waiting"
        self.worker_id = grant.worker_id
        self.leases = (*self.leases[1 - _MOST_LEASES :], grant)

    def grant(self, lease_id: int) -> Grant | None:
        """Return a lease of this sample; None if the sample never had the lease, or had it too long ago."""
        return next((grant for grant in self.leases if grant.lease_id == lease_id), None)

    def remembers(self, lease_id: int) -> bool:
        """Return True if `grant` would know this lease: no older lease of the sample is forgotten."""
        return len(self.leases) < _MOST_LEASES or lease_id > self.leases[0].lease_id

    def is_newest(self, lease_id: int) -> bool:
        """Return True if no later lease can finish the sample: a failure is final, a partial rollout the longest."""
        return not self.trajectories and bool(self.leases) and self.leases[-1].lease_id == lease_id

    def adopts(self, lease_id: int, worker_id: str) -> bool:
        """Let a worker taken for dead go on; returns False if the sample does not wait for this lease."""
        if self.worker_id is not None or not self.is_newest(lease_id) or self.leases[-1].worker_id != worker_id:
            return False
        self.worker_id = worker_id
        self.num_attempts -= self.lost_as_attempt
        return True

    def finish(self, trajectories: Sequence[Trajectory]) -> None:
        assert not self.trajectories, "a sample finishes once"
        self.trajectories, self.worker_id, self.partial = tuple(trajectories), None, b""

    def lose(self, lease_id: int, *, is_attempt: bool) -> bool:
        """Let the sample wait for another lease; returns False if this lease does not hold the sample.

        Without `is_attempt`, the sample is not why: the lease was lost, the worker was stopped, or is to blame itself.
        """
        if self.worker_id is None or lease_id != self.leases[-1].lease_id:
            return False
        self.worker_id = None
        self.num_attempts += is_attempt
        self.lost_as_attempt = is_attempt
        return True


@dataclass(slots=True)
class LedgerGroup:
    """An admitted group that is neither trained nor dropped. `samples` does not contain dropped samples."""

    group_id: int
    prompt: Prompt
    admission_version: int
    deadline: int
    samples: dict[int, Sample] = field(default_factory=dict)
    in_training: bool = False

    @property
    def complete(self) -> bool:
        return all(sample.trajectories for sample in self.samples.values())

    @property
    def num_missing(self) -> int:
        """Number of samples without trajectories."""
        return sum(not sample.trajectories for sample in self.samples.values())

    @property
    def group(self) -> Group:
        assert self.complete, f"group {self.group_id} is not complete"
        done = [trajectory for _, sample in sorted(self.samples.items()) for trajectory in sample.trajectories]
        prompt = self.prompt
        return Group(self.group_id, self.deadline, tuple(done), prompt.item.source, prompt.epoch, prompt.item_index)


@dataclass(frozen=True, slots=True)
class Drop:
    """A dropped sample, for inspection; `trajectories` is empty if none arrived."""

    group_id: int
    sample_index: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    reason: str
    detail: str


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


class Ledger:
    """Counts and live groups; every change of state is a method."""

    def __init__(self) -> None:
        self.groups: dict[int, LedgerGroup] = {}
        self.admitted_groups = 0
        self.dropped_groups = 0
        self._to_lease: set[int] = set()  # groups to look through for waiting samples
        self._admitted = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._dropped_tokens: Counter[str] = Counter()
        self._drops: deque[Drop] = deque(maxlen=_MOST_DROPS)

    def admit(self, prompt: Prompt, *, group_size: int, admission_version: int, deadline: int) -> LedgerGroup:
        """Add a group, with all samples waiting for a lease."""
        samples = {index: Sample() for index in range(group_size)}
        group = LedgerGroup(self.admitted_groups, prompt, admission_version, deadline, samples)
        self.groups[group.group_id] = group
        self._to_lease.add(group.group_id)
        self.admitted_groups += 1
        self._admitted += group_size
        return group

    def sample(self, sample_id: SampleId) -> Sample | None:
        """Return a sample; None if it has an outcome already, or never was."""
        group = self.groups.get(sample_id[0])
        return None if group is None else group.samples.get(sample_id[1])

    def drop_sample(self, sample_id: SampleId, reason: str, *, detail: str = "", num_tokens: int = 0) -> LedgerGroup:
        """Drop a sample outside training; returns the rest of the group.

        `num_tokens`: the completion tokens of a sample whose trajectories never arrived; 0 if they are not known.
        """
        group = self.groups[sample_id[0]]
        assert not group.in_training, f"sample {sample_id} is being trained on"
        self._drop(group, sample_id[1], reason, detail, num_tokens)
        return group

    def drop_group(self, group_id: int, reason: str, *, in_training: bool = False) -> None:
        """Drop the remaining samples of a group, and give the place back to admission."""
        group = self.groups.pop(group_id)
        assert group.in_training == in_training, f"group {group_id}: expected in_training={in_training}"
        for sample_index in list(group.samples):
            self._drop(group, sample_index, reason)
        self.dropped_groups += 1

    def begin_training(self, group_id: int) -> Group:
        """Begin to train on a complete group; returns the group."""
        group = self.groups[group_id]
        assert not group.in_training, f"group {group_id} is being trained on already"
        group.in_training = True
        return group.group

    def train_group(self, group_id: int) -> None:
        """Count a group in training as trained."""
        group = self.groups.pop(group_id)
        assert group.in_training, f"group {group_id} is not being trained on"
        self._trained += len(group.samples)

    def take_drops(self) -> list[Drop]:
        """Return the samples dropped since the last call, at most the newest 256."""
        drops = list(self._drops)
        self._drops.clear()
        return drops

    def wait_again(self, group_id: int) -> None:
        """Look again for waiting samples in this group."""
        self._to_lease.add(group_id)

    def waiting(self) -> list[tuple[LedgerGroup, tuple[int, ...]]]:
        """List the groups with waiting samples, earliest deadline first."""
        found = []
        for group_id in list(self._to_lease):
            group = self.groups.get(group_id)
            samples = group.samples.items() if group is not None else ()
            indices = tuple(index for index, sample in samples if sample.worker_id is None and not sample.trajectories)
            if group is None or not indices:
                self._to_lease.discard(group_id)
            else:
                found.append((group, indices))
        return sorted(found, key=lambda waiting: (waiting[0].deadline, waiting[0].group_id))

    def counts(self) -> LedgerCounts:
        is_here = [bool(sample.trajectories) for group in self.groups.values() for sample in group.samples.values()]
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=dict(self._dropped),
            dropped_tokens=dict(self._dropped_tokens),
            buffered=is_here.count(True),
            in_flight=is_here.count(False),
        )

    def state(self) -> LedgerState:
        groups = [
            SavedGroup(
                group.group_id,
                group.prompt.epoch,
                group.prompt.item_index,
                group.admission_version,
                group.deadline,
                [_saved(index, sample) for index, sample in group.samples.items()],
            )
            for group in self.groups.values()
        ]
        return LedgerState(
            self.admitted_groups,
            self.dropped_groups,
            self._admitted,
            self._trained,
            dict(self._dropped),
            dict(self._dropped_tokens),
            groups,
        )

    @classmethod
    def restored(
        cls, state: LedgerState, prompts: dict[int, Prompt], trajectories: dict[SampleId, tuple[Trajectory, ...]]
    ) -> Ledger:
        """Restore a ledger, with the prompts of the live groups and the trajectories of the buffered samples.

        Samples in flight wait for a lease.
        """
        ledger = cls()
        ledger.admitted_groups, ledger.dropped_groups = state.admitted_groups, state.dropped_groups
        ledger._admitted, ledger._trained = state.admitted, state.trained
        ledger._dropped, ledger._dropped_tokens = Counter(state.dropped), Counter(state.dropped_tokens)
        for saved in state.groups:
            name = saved.group_id
            ledger._to_lease.add(name)
            ledger.groups[name] = group = LedgerGroup(name, prompts[name], saved.admission_version, saved.deadline)
            for sample in saved.samples:
                done = trajectories[(name, sample.sample_index)] if sample.buffered else ()
                group.samples[sample.sample_index] = Sample(None, (), sample.num_attempts, done, sample.partial)
        return ledger

    def _drop(self, group: LedgerGroup, sample_index: int, reason: str, detail: str = "", num_tokens: int = 0) -> None:
        sample = group.samples.pop(sample_index)
        self._drops.append(Drop(group.group_id, sample_index, group.prompt, sample.trajectories, reason, detail))
        self._dropped[reason] += 1
        arrived = sum(num_written(trajectory.completion) for trajectory in sample.trajectories)
        if known := arrived or num_tokens or num_tokens_of(sample.partial):
            self._dropped_tokens[reason] += known


def _saved(sample_index: int, sample: Sample) -> SavedSample:
    return SavedSample(sample_index, sample.num_attempts, bool(sample.trajectories), sample.partial)


def by_sample(trajectories: Iterable[Trajectory]) -> dict[SampleId, tuple[Trajectory, ...]]:
    """Map each sample to the trajectories of the sample, in order."""
    samples: dict[SampleId, list[Trajectory]] = {}
    for trajectory in trajectories:
        samples.setdefault(trajectory.sample_id, []).append(trajectory)
    return {sample_id: tuple(made) for sample_id, made in samples.items()}
