"""The ledger: which worker owes which sample, and the outcome of every sample.

The intake records every event: a group admitted, a sample leased, finished, lost or failed, a group trained or dropped.
At every moment, in samples,

    admitted = trained + dropped(reason) + buffered + in_flight

A sample is in flight from admission until its trajectories arrive; buffered until its group is trained or dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from areal_rloo.intake.prompts import Prompt
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Group, SampleId, Trajectory

_MOST_DROPS = 256  # kept for inspection; all are counted


@dataclass(slots=True)
class _Sample:
    """A sample that is neither trained nor dropped: in flight without trajectories, buffered with them."""

    worker_id: str | None = None  # None: waits for a lease
    num_leases: int = 0
    trajectories: tuple[Trajectory, ...] = ()


@dataclass(slots=True)
class LedgerGroup:
    """An admitted group that is neither trained nor dropped. `samples` does not contain dropped samples."""

    group_id: int
    prompt: Prompt
    admission_version: int
    deadline: int
    samples: dict[int, _Sample] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(sample.trajectories for sample in self.samples.values())

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

    sample_index: int
    num_leases: int
    buffered: bool


class SavedGroup(msgspec.Struct, frozen=True):
    """A live group in a checkpoint."""

    group_id: int
    epoch: int
    item_index: int
    admission_version: int
    deadline: int
    samples: list[SavedSample]


class LedgerState(msgspec.Struct, frozen=True):
    """The ledger in a checkpoint."""

    admitted_groups: int  # the next group id, too
    dropped_groups: int
    admitted: int
    trained: int
    dropped: dict[str, int]
    groups: list[SavedGroup]


class Ledger:
    """Counts and live groups; every change of state is a method."""

    def __init__(self) -> None:
        self.groups: dict[int, LedgerGroup] = {}
        self.admitted_groups = 0
        self.dropped_groups = 0
        self._admitted = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._drops: deque[Drop] = deque(maxlen=_MOST_DROPS)

    def admit(self, prompt: Prompt, *, group_size: int, admission_version: int, deadline: int) -> LedgerGroup:
        """Add a group, with all samples in flight and not leased."""
        samples = {index: _Sample() for index in range(group_size)}
        group = LedgerGroup(self.admitted_groups, prompt, admission_version, deadline, samples)
        self.groups[group.group_id] = group
        self.admitted_groups += 1
        self._admitted += group_size
        return group

    def lease(self, sample_id: SampleId, worker_id: str) -> None:
        """Record that a worker owes a sample."""
        sample = self._live(sample_id)
        assert sample is not None and sample.worker_id is None, f"sample {sample_id} cannot be leased"
        sample.worker_id = worker_id
        sample.num_leases += 1

    def finish(self, trajectories: Sequence[Trajectory]) -> LedgerGroup | None:
        """Record all trajectories of a sample, from any worker; returns None for a repeat or a sample not live."""
        sample = self._live(trajectories[0].sample_id)
        if sample is None or sample.trajectories:
            return None
        sample.trajectories = tuple(trajectories)
        sample.worker_id = None
        return self.groups[trajectories[0].group_id]

    def lose(self, sample_id: SampleId) -> int:
        """Let a leased sample wait for another lease; returns the number of its leases, 0 if it is not in flight."""
        sample = self._live(sample_id)
        if sample is None or sample.trajectories:
            return 0
        sample.worker_id = None
        return sample.num_leases

    def drop_sample(self, sample_id: SampleId, reason: str, *, detail: str = "") -> bool:
        """Drop a sample; returns False for a sample that is not live."""
        sample = self._live(sample_id)
        if sample is None:
            return False
        group = self.groups[sample_id[0]]
        del group.samples[sample_id[1]]
        self._drops.append(Drop(*sample_id, group.prompt, sample.trajectories, reason, detail))
        self._dropped[reason] += 1
        return True

    def drop_group(self, group_id: int, reason: str) -> None:
        """Drop the remaining samples of a group, and give the place back to admission."""
        for sample_index in list(self.groups[group_id].samples):
            self.drop_sample((group_id, sample_index), reason)
        del self.groups[group_id]
        self.dropped_groups += 1

    def train_group(self, group_id: int) -> None:
        """Record that a complete group was trained on."""
        group = self.groups.pop(group_id)
        assert group.complete, f"group {group_id} was trained on incomplete"
        self._trained += len(group.samples)

    def take_drops(self) -> list[Drop]:
        """Return the samples dropped since the last call, at most the newest 256."""
        drops = list(self._drops)
        self._drops.clear()
        return drops

    def waiting(self) -> Iterator[tuple[LedgerGroup, tuple[int, ...]]]:
        """Yield the groups with samples that wait for a lease, earliest deadline first."""
        for group in sorted(self.groups.values(), key=lambda g: (g.deadline, g.group_id)):
            indices = tuple(i for i, s in group.samples.items() if s.worker_id is None and not s.trajectories)
            if indices:
                yield group, indices

    def counts(self) -> LedgerCounts:
        is_here = [bool(sample.trajectories) for group in self.groups.values() for sample in group.samples.values()]
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=dict(self._dropped),
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
                [SavedSample(i, s.num_leases, bool(s.trajectories)) for i, s in group.samples.items()],
            )
            for group in self.groups.values()
        ]
        dropped = dict(self._dropped)
        return LedgerState(self.admitted_groups, self.dropped_groups, self._admitted, self._trained, dropped, groups)

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
        ledger._dropped = Counter(state.dropped)
        for saved in state.groups:
            name = saved.group_id
            ledger.groups[name] = group = LedgerGroup(name, prompts[name], saved.admission_version, saved.deadline)
            for sample in saved.samples:
                done = trajectories[(name, sample.sample_index)] if sample.buffered else ()
                group.samples[sample.sample_index] = _Sample(None, sample.num_leases, done)
        return ledger

    def _live(self, sample_id: SampleId) -> _Sample | None:
        group = self.groups.get(sample_id[0])
        return None if group is None else group.samples.get(sample_id[1])


def by_sample(trajectories: Iterable[Trajectory]) -> dict[SampleId, tuple[Trajectory, ...]]:
    """Map each sample to the trajectories of the sample, in order."""
    samples: dict[SampleId, tuple[Trajectory, ...]] = {}
    for trajectory in trajectories:
        samples[trajectory.sample_id] = (*samples.get(trajectory.sample_id, ()), trajectory)
    return samples
