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
from typing import NamedTuple

from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.work import Drop, Totals
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Group, SampleId, Trajectory
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
        if self.leases and self.leases[-1].lease_id == lease_id:  # of nearly all answers
            return self.leases[-1]
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
    num_missing: int = field(init=False)  # samples without trajectories; only the ledger changes this

    def __post_init__(self) -> None:
        self.num_missing = sum(not sample.trajectories for sample in self.samples.values())

    @property
    def complete(self) -> bool:
        return self.num_missing == 0

    @property
    def waiting(self) -> tuple[int, ...]:
        """The indices of the samples that wait for a lease."""
        return tuple([i for i, sample in self.samples.items() if sample.worker_id is None and not sample.trajectories])

    @property
    def group(self) -> Group:
        assert self.complete, f"group {self.group_id} is not complete"
        done = [trajectory for _, sample in sorted(self.samples.items()) for trajectory in sample.trajectories]
        item, prompt = self.prompt.item, self.prompt
        place = (item.source, prompt.epoch, prompt.item_index, item.answer)
        return Group(self.group_id, self.deadline, tuple(done), *place)


class Ledger:
    """Counts and live groups; every change of state is a method."""

    def __init__(self, groups: Iterable[LedgerGroup] = (), totals: Totals | None = None) -> None:
        self.groups = {group.group_id: group for group in groups}
        self.totals = Totals() if totals is None else totals
        self.num_due = Counter(group.deadline for group in self.groups.values())  # live groups by deadline
        is_here = [bool(sample.trajectories) for group in self.groups.values() for sample in group.samples.values()]
        self._buffered, self._in_flight = is_here.count(True), is_here.count(False)
        self._drops: deque[Drop] = deque(maxlen=_MOST_DROPS)

    @property
    def admitted_groups(self) -> int:
        """Number of groups admitted since the beginning of the run; the next group id."""
        return self.totals.admitted_groups

    def admit(self, prompt: Prompt, *, group_size: int, admission_version: int, deadline: int) -> LedgerGroup:
        """Add a group, with all samples waiting for a lease."""
        samples = {index: Sample() for index in range(group_size)}
        group = LedgerGroup(self.admitted_groups, prompt, admission_version, deadline, samples)
        self.groups[group.group_id] = group
        self._count_due(deadline, 1)
        self.totals.admitted_groups += 1
        self.totals.admitted += group_size
        self._in_flight += group_size
        return group

    def sample(self, sample_id: SampleId) -> Sample | None:
        """Return a sample; None if it has an outcome already, or never was."""
        group = self.groups.get(sample_id[0])
        return None if group is None else group.samples.get(sample_id[1])

    def finish(self, sample_id: SampleId, trajectories: Sequence[Trajectory]) -> LedgerGroup:
        """Record all trajectories of a sample in flight; returns the group."""
        group = self.groups[sample_id[0]]
        group.samples[sample_id[1]].finish(trajectories)
        group.num_missing -= 1
        self._in_flight -= 1
        self._buffered += 1
        return group

    def set_deadline(self, group: LedgerGroup, deadline: int) -> None:
        """Change the deadline of a group, before an intake orders the groups by deadline."""
        self._count_due(group.deadline, -1)
        self._count_due(deadline, 1)
        group.deadline = deadline

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
        group = self._remove(group_id)
        assert group.in_training == in_training, f"group {group_id}: expected in_training={in_training}"
        for sample_index in list(group.samples):
            self._drop(group, sample_index, reason)
        self.totals.dropped_groups += 1

    def begin_training(self, group_id: int) -> Group:
        """Begin to train on a complete group; returns the group."""
        group = self.groups[group_id]
        assert not group.in_training, f"group {group_id} is being trained on already"
        group.in_training = True
        return group.group

    def train_group(self, group_id: int) -> LedgerGroup:
        """Count a group in training as trained; returns the group."""
        group = self._remove(group_id)
        assert group.in_training, f"group {group_id} is not being trained on"
        self.totals.trained += len(group.samples)
        self._buffered -= len(group.samples)
        return group

    def take_drops(self) -> list[Drop]:
        """Return the samples dropped since the last call, at most the newest 256."""
        drops, self._drops = [*self._drops], deque(maxlen=_MOST_DROPS)
        return drops

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self.totals.admitted,
            trained=self.totals.trained,
            dropped=dict(self.totals.dropped),
            dropped_tokens=dict(self.totals.dropped_tokens),
            buffered=self._buffered,
            in_flight=self._in_flight,
        )

    def _remove(self, group_id: int) -> LedgerGroup:
        group = self.groups.pop(group_id)
        self._count_due(group.deadline, -1)
        return group

    def _count_due(self, deadline: int, change: int) -> None:
        self.num_due[deadline] += change
        if not self.num_due[deadline]:
            del self.num_due[deadline]

    def _drop(self, group: LedgerGroup, sample_index: int, reason: str, detail: str = "", num_tokens: int = 0) -> None:
        sample = group.samples.pop(sample_index)
        group.num_missing -= not sample.trajectories
        self._buffered -= bool(sample.trajectories)
        self._in_flight -= not sample.trajectories
        self._drops.append(Drop(group.group_id, sample_index, group.prompt, sample.trajectories, reason, detail))
        self.totals.dropped[reason] += 1
        arrived = sum(num_written(trajectory.completion) for trajectory in sample.trajectories)
        if known := arrived or num_tokens or num_tokens_of(sample.partial):
            self.totals.dropped_tokens[reason] += known
