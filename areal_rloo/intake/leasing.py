"""Admission and leases: which groups may start, and which worker generates which samples.

The intake calls `grants` after every event and sends the leases. Admission follows the staleness bound and the free
capacity of the workers. Lost samples take their room before new groups are admitted. The cost of an event does not grow
with what is in flight, with the workers that have no room, nor with a step: a large one is leased a part at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from areal_rloo.algorithm.staleness import deadline, num_admissible
from areal_rloo.config import Config
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.ledger import Grant, Ledger, LedgerGroup, Sample
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.intake.queues import Room, Waiting
from areal_rloo.intake.worker import Worker
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId, purpose_of
from areal_rloo.wire.messages import Duty, Lease
from areal_rloo.wire.turns import oldest_version

logger = get_logger(__name__)

_Samples = Mapping[int, Sample | None]  # by index
_MOST_GRANTED = 256  # samples at once: all leases for the next step of 64 workers would hold up the loop for 60 ms


@dataclass(slots=True, kw_only=True)
class Leasing:
    """Decides on leases, and knows the sample of every duty."""

    config: Config
    ledger: Ledger
    fleet: Fleet
    buffer: Buffer
    stream: PromptStream
    evaluation: Evaluation
    newest_lease: int = field(default=0, init=False)  # the last lease id
    owes: bool = field(default=False, init=False)  # the last `grants` left some for the next
    _num_turns: int = field(default=0, init=False)  # of workers, at the groups of evaluations
    _first_seed: int = field(init=False)  # of group 0: far from the seeds of every other run seed
    _queue: Waiting = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(str(self.config.run.seed).encode(), digest_size=8).digest()
        self._first_seed = int.from_bytes(digest) >> 20 << 20
        self._queue = Waiting(self.ledger.groups.values())

    def sample(self, sample_id: SampleId) -> Sample | None:
        """Return a sample of the ledger or of the evaluation; None if the sample has an outcome, or never was."""
        return (self.evaluation if purpose_of(sample_id[0]) == "eval" else self.ledger).sample(sample_id)

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a group that has samples without an outcome."""
        if purpose_of(group_id) == "eval":
            return self.evaluation.prompt(group_id)
        return self.ledger.groups[group_id].prompt

    def prompt_to_train(self, group_id: int) -> Prompt | None:
        """Return the prompt of a group of the ledger; None if there is no such group."""
        group = self.ledger.groups.get(group_id)
        return None if group is None else group.prompt

    def has_granted(self, duty: Duty) -> bool:
        """Return False if this learner cannot have granted this duty."""
        if not 0 < duty.lease_id <= self.newest_lease:
            return False
        if duty.purpose == "eval":
            return self.evaluation.has_begun(duty.group_id)
        return duty.group_id < self.ledger.admitted_groups

    def grants(self, policy_version: int, published: int) -> list[tuple[Worker, list[Lease]]]:
        """Grant leases: evaluation first, then lost samples, then groups not yet started. `owes`: there are more."""
        self.owes = False
        num_new = min(self._num_admissible(policy_version, published), self.stream.num_left)
        leases = [*self._evaluation_leases()]
        if num_new or self._queue:  # after most messages, neither
            leases += self._train_leases(policy_version, published, num_new)
        granted: dict[str, tuple[Worker, list[Lease]]] = {}
        for worker, lease in leases:
            granted.setdefault(worker.worker_id, (worker, []))[1].append(lease)
        return list(granted.values())

    def _evaluation_leases(self) -> Iterator[tuple[Worker, Lease]]:
        """Lease the evaluation to all workers in turn, whatever room they have."""
        if not self.evaluation.has_waiting:
            return
        workers = [worker for worker in self.fleet.alive.values() if worker.gets_leases]
        trusted = [worker for worker in workers if not worker.num_lies] or workers
        for group_id, prompt, indices in self.evaluation.take_waiting(_MOST_GRANTED) if workers else ():
            last = self._last_holders(self.evaluation.sample((group_id, index)) for index in indices)
            choice = ([worker for worker in trusted if worker.worker_id not in last] if last else []) or trusted
            worker = choice[self._num_turns % len(choice)]
            self._num_turns += 1
            seed, version = self.evaluation.seed(group_id), self.evaluation.policy_version
            samples = {index: self.evaluation.sample((group_id, index)) for index in indices}
            yield worker, self._lease(worker, group_id, samples, prompt, version, seed)
        self.owes = bool(workers) and self.evaluation.has_waiting

    def _train_leases(self, policy_version: int, published: int, num_new: int) -> Iterator[tuple[Worker, Lease]]:
        """Lease whole groups to the worker with the most room, liars last, while any worker has room."""
        room = Room(self.fleet, num_new, self.config.algorithm.group_size)
        most = _MOST_GRANTED
        while room and most > 0 and (group := self._next_group(policy_version, published, room)) is not None:
            indices = group.waiting
            last_holders = self._last_holders(group.samples[index] for index in indices)
            if (worker := room.take(last_holders)) is None:
                self._queue.put_aside(group, last_holders)  # takes no room, so others get their turn
                continue
            version = max(group.admission_version, worker.joined_version)
            seed = (self._first_seed + (group.group_id << 20)) % 2**64  # sample i adds i
            most -= len(indices)
            if group.deadline < policy_version:  # new tokens respect the bound, and those so far do not
                for index in indices:
                    group.samples[index].partial = b""
            for together in _leased_together(group, indices):
                samples = {index: group.samples[index] for index in together}
                yield worker, self._lease(worker, group.group_id, samples, group.prompt, version, seed)
            room.put_back(worker)
        self.owes |= most <= 0

    def _next_group(self, policy_version: int, published: int, room: Room) -> LedgerGroup | None:
        """Return the group with waiting samples and the earliest deadline, else a new group; None if there is none."""
        return self._queue.pop(self.ledger.groups, room) or self._admit(policy_version, published)

    def _last_holders(self, samples: Iterable[Sample | None]) -> frozenset[str]:
        """Name the last holder of each sample that has a single attempt left: no worker alone uses up a sample."""
        most, held = self.config.wire.max_attempts - 1, (s for s in samples if s is not None and s.leases)
        return frozenset(s.leases[-1].worker_id for s in held if 0 < most <= s.num_attempts)

    def lose(self, lost: Iterable[Duty], *, is_attempt: bool, num_tokens: int = 0) -> None:
        """Queue the samples of lost duties for another lease; drop a sample after `wire.max_attempts` attempts.

        `is_attempt`: the samples may be why the duties were lost. `num_tokens`: of the failure that loses a duty.
        """
        for duty in sorted(lost):
            sample = self.sample(duty.sample_id)
            if sample is None or not sample.lose(duty.lease_id, is_attempt=is_attempt):
                continue
            if sample.num_attempts >= self.config.wire.max_attempts:
                self.drop(duty.sample_id, "max_attempts", detail=f"{sample.num_attempts} lost", num_tokens=num_tokens)
            elif duty.purpose == "eval":
                self.evaluation.wait_again(duty.sample_id)
            else:
                self._queue.push(self.ledger.groups[duty.group_id])

    def drop(self, sample_id: SampleId, reason: str, *, detail: str = "", num_tokens: int = 0) -> None:
        """Drop a sample without an outcome, and the group if too few samples are left; an evaluation counts it 0."""
        logger.warning("drop sample %s: %s: %s", sample_id, reason, detail.partition("\n")[0])
        if purpose_of(sample_id[0]) == "eval":
            self.evaluation.fail(sample_id, num_tokens)
        else:
            self.buffer.settle(self.ledger.drop_sample(sample_id, reason, detail=detail, num_tokens=num_tokens))

    def _lease(
        self, worker: Worker, group_id: int, samples: _Samples, prompt: Prompt, version: int, seed: int
    ) -> Lease:
        self.newest_lease += 1
        first = next(iter(samples.values()))
        most = self.config.wire.max_message_bytes // 2  # the item and the prompt have the rest
        # Without a partial rollout of a liar, or of a run with longer messages, the sample begins anew.
        partial = b"" if first is None or len(first.partial) > most else first.partial
        lease = Lease(self.newest_lease, group_id, tuple(samples), prompt.tokens, prompt.item, version, seed, partial)
        grant = Grant(lease.lease_id, worker.worker_id, oldest_version(partial, version), bool(partial))
        for index, sample in samples.items():  # a commit leases a whole step: little work for each
            assert sample is not None, f"sample {(group_id, index)} has an outcome already"
            sample.lease(grant)
        worker.take(lease)
        trace.record("intake", "granted", group=group_id, samples=list(samples), lease=lease.lease_id)
        return lease

    def _admit(self, policy_version: int, published: int) -> LedgerGroup | None:
        """Admit a group if the bound and the end of the run allow another, and there is a prompt."""
        if not self._num_admissible(policy_version, published) or (prompt := self.stream.take()) is None:
            return None
        algorithm = self.config.algorithm
        return self.ledger.admit(
            prompt,
            group_size=algorithm.group_size,
            admission_version=published,
            deadline=deadline(admission_version=published, max_staleness=algorithm.max_staleness),
        )

    def _num_admissible(self, policy_version: int, published: int) -> int:
        return num_admissible(
            policy_version=policy_version,
            published_version=published,
            max_staleness=self.config.algorithm.max_staleness,
            pipeline_depth=self.config.algorithm.pipeline_depth,
            groups_per_step=self.config.learner.groups_per_step,
            num_train_steps=self.config.learner.num_train_steps,
            num_live=len(self.ledger.groups),
        )


def _leased_together(group: LedgerGroup, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the samples of each lease: all new samples together, and each partial rollout alone."""
    partial = [(index,) for index in indices if group.samples[index].partial]
    new = tuple(index for index in indices if not group.samples[index].partial) if partial else indices
    return [*partial, new] if new else [*partial]
