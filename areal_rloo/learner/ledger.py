"""The ledger: who owes which sample, and what became of it.

The intake writes every event into it, on one thread: a group admitted, a sample leased, finished, lost or failed, a
group trained or dropped. At every moment, in samples,

    admitted = trained + dropped(reason) + buffered + in_flight

A sample is in flight from admission until its trajectory is here; buffered until its group is trained or dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from areal_rloo.learner.prompts import Prompt
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Group, SampleId, Trajectory

_MOST_DROPS = 256  # kept to be looked at; all are counted


@dataclass(slots=True)
class _Sample:
    """One sample that is neither trained nor dropped: in flight without trajectories, buffered with them."""

    worker_id: str | None = None  # None: waits to be leased
    num_leases: int = 0
    trajectories: tuple[Trajectory, ...] = ()


@dataclass(slots=True)
class LedgerGroup:
    """An admitted group that is neither trained nor dropped. Samples that were dropped are no longer in `samples`."""

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
    """A sample that was dropped, for those who look at runs: `trajectories` is empty where it never arrived."""

    group_id: int
    sample_index: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    reason: str
    detail: str


class SavedSample(msgspec.Struct, frozen=True):
    """A live sample in a checkpoint. A buffered one is saved with its trajectories, encoded by the caller."""

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
    """What a checkpoint keeps of the ledger."""

    next_group_id: int
    admitted_groups: int
    dropped_groups: int
    admitted: int
    trained: int
    dropped: dict[str, int]
    groups: list[SavedGroup]


class Ledger:
    """Counts and live groups; every change of state goes through one of its methods."""

    def __init__(self) -> None:
        self.groups: dict[int, LedgerGroup] = {}
        self.admitted_groups = 0
        self.dropped_groups = 0
        self._next_group_id = 0
        self._admitted = 0
        self._trained = 0
        self._buffered = 0
        self._dropped: Counter[str] = Counter()
        self._drops: deque[Drop] = deque(maxlen=_MOST_DROPS)

    def admit(self, prompt: Prompt, *, group_size: int, admission_version: int, deadline: int) -> LedgerGroup:
        """A new group, all of its samples in flight and not leased."""
        group = LedgerGroup(self._next_group_id, prompt, admission_version, deadline)
        group.samples = {index: _Sample() for index in range(group_size)}
        self.groups[group.group_id] = group
        self._next_group_id += 1
        self.admitted_groups += 1
        self._admitted += group_size
        return group

    def lease(self, sample_id: SampleId, worker_id: str) -> None:
        """A worker takes a sample on."""
        sample = self._live(sample_id)
        assert sample is not None and sample.worker_id is None, f"sample {sample_id} cannot be leased"
        sample.worker_id = worker_id
        sample.num_leases += 1

    def num_leases(self, sample_id: SampleId) -> int:
        """How often a live sample was leased."""
        sample = self._live(sample_id)
        assert sample is not None, f"sample {sample_id} is not live"
        return sample.num_leases

    def finish(self, trajectories: Sequence[Trajectory]) -> LedgerGroup | None:
        """All trajectories of a sample arrived, from whichever worker; None for a repeat, or where nobody waits."""
        sample = self._live(trajectories[0].sample_id)
        if sample is None or sample.trajectories:
            return None
        sample.trajectories = tuple(trajectories)
        sample.worker_id = None
        self._buffered += 1
        return self.groups[trajectories[0].group_id]

    def lose(self, sample_id: SampleId) -> bool:
        """A leased sample will not come from its worker: it waits for a lease again. False if it is not in flight."""
        sample = self._live(sample_id)
        if sample is None or sample.trajectories:
            return False
        sample.worker_id = None
        return True

    def drop_sample(self, sample_id: SampleId, reason: str, *, detail: str = "") -> bool:
        """A sample will never be trained on. False for one that is not live."""
        sample = self._live(sample_id)
        if sample is None:
            return False
        group = self.groups[sample_id[0]]
        del group.samples[sample_id[1]]
        self._drops.append(Drop(*sample_id, group.prompt, sample.trajectories, reason, detail))
        self._buffered -= bool(sample.trajectories)
        self._dropped[reason] += 1
        return True

    def drop_group(self, group_id: int, reason: str) -> None:
        """All that is left of a group is dropped, and its place is given back to admission."""
        for sample_index in list(self.groups[group_id].samples):
            self.drop_sample((group_id, sample_index), reason)
        del self.groups[group_id]
        self.dropped_groups += 1

    def train_group(self, group_id: int) -> None:
        """A complete group was trained on."""
        group = self.groups.pop(group_id)
        assert group.complete, f"group {group_id} was trained on incomplete"
        self._trained += len(group.samples)
        self._buffered -= len(group.samples)

    def take_drops(self) -> list[Drop]:
        """What was dropped since the last call, the newest if it was very much."""
        drops = list(self._drops)
        self._drops.clear()
        return drops

    def waiting(self) -> Iterator[tuple[LedgerGroup, tuple[int, ...]]]:
        """Groups with samples that wait for a lease, earliest deadline first."""
        for group in sorted(self.groups.values(), key=lambda g: (g.deadline, g.group_id)):
            indices = tuple(i for i, s in group.samples.items() if s.worker_id is None and not s.trajectories)
            if indices:
                yield group, indices

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=dict(self._dropped),
            buffered=self._buffered,
            in_flight=sum(
                not sample.trajectories for group in self.groups.values() for sample in group.samples.values()
            ),
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
        return LedgerState(
            self._next_group_id,
            self.admitted_groups,
            self.dropped_groups,
            self._admitted,
            self._trained,
            dict(self._dropped),
            groups,
        )

    @classmethod
    def restored(
        cls, state: LedgerState, prompts: dict[int, Prompt], trajectories: dict[SampleId, tuple[Trajectory, ...]]
    ) -> Ledger:
        """A ledger as it was, what was in flight waiting to be leased again.

        Args:
            state: what `state` gave.
            prompts: of the live groups, by group id.
            trajectories: of the buffered samples.
        """
        ledger = cls()
        ledger._next_group_id = state.next_group_id
        ledger.admitted_groups, ledger.dropped_groups = state.admitted_groups, state.dropped_groups
        ledger._admitted, ledger._trained = state.admitted, state.trained
        ledger._dropped = Counter(state.dropped)
        for saved in state.groups:
            group = LedgerGroup(saved.group_id, prompts[saved.group_id], saved.admission_version, saved.deadline)
            for sample in saved.samples:
                done = trajectories[(saved.group_id, sample.sample_index)] if sample.buffered else ()
                group.samples[sample.sample_index] = _Sample(None, sample.num_leases, done)
                ledger._buffered += sample.buffered
            ledger.groups[saved.group_id] = group
        return ledger

    def _live(self, sample_id: SampleId) -> _Sample | None:
        group = self.groups.get(sample_id[0])
        return None if group is None else group.samples.get(sample_id[1])


def by_sample(trajectories: Iterable[Trajectory]) -> dict[SampleId, tuple[Trajectory, ...]]:
    """The trajectories of each sample, in their order."""
    samples: dict[SampleId, tuple[Trajectory, ...]] = {}
    for trajectory in trajectories:
        samples[trajectory.sample_id] = (*samples.get(trajectory.sample_id, ()), trajectory)
    return samples
