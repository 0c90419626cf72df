"""Admission and leases: which groups may start, and which worker generates which samples.

The intake calls `grants` after every event and sends the leases. Admission follows the staleness bound and the free
capacity of the workers. Lost samples take their room before new groups are admitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_rloo.algorithm.staleness import deadline, num_admissible
from areal_rloo.config import Config
from areal_rloo.errors import DecodeError
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Worker, without_last_holders
from areal_rloo.intake.ledger import Grant, Ledger, LedgerGroup, Sample
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId, purpose_of
from areal_rloo.wire.messages import Duty, Lease
from areal_rloo.wire.turns import decode_turns

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Leasing:
    """Decides on leases, and knows the sample of every duty."""

    config: Config
    ledger: Ledger
    buffer: Buffer
    stream: PromptStream
    evaluation: Evaluation
    newest_lease: int = field(default=0, init=False)  # the last lease id
    _first_seed: int = field(init=False)  # of group 0: far from the seeds of every other run seed

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(str(self.config.run.seed).encode(), digest_size=8).digest()
        self._first_seed = int.from_bytes(digest) >> 20 << 20

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

    def grants(self, workers: Sequence[Worker], policy_version: int) -> list[tuple[Worker, list[Lease]]]:
        """Grant all leases possible now: evaluation first, then lost samples, then groups not yet started."""
        workers = [worker for worker in workers if worker.gets_leases]
        if not workers:
            return []
        granted: dict[str, list[Lease]] = {worker.worker_id: [] for worker in workers}
        most = self.config.wire.max_attempts
        trusted = [worker for worker in workers if not worker.num_lies] or workers
        for number, (group_id, prompt, indices) in enumerate(self.evaluation.take_waiting()):
            choice = without_last_holders(trusted, [self.evaluation.sample((group_id, i)) for i in indices], most)
            worker = choice[number % len(choice)]
            seed, version = self.evaluation.seed(group_id), self.evaluation.policy_version
            granted[worker.worker_id].append(self._lease(worker, group_id, indices, prompt, version, seed))
        choices: dict[int, list[Worker]] = {}
        num_waiting = 0
        for group, indices in self.ledger.waiting():
            choice = without_last_holders(workers, [group.samples[index] for index in indices], most)
            choices[group.group_id] = choice
            if choice is workers or any(worker.free_samples > 0 for worker in choice):
                num_waiting += len(indices)  # the others wait for room at another worker, and take none
        self._admit(sum(max(0, worker.free_samples) for worker in workers) - num_waiting, policy_version)
        for group, indices in self.ledger.waiting():
            choice = choices.get(group.group_id, workers)
            worker = max(choice, key=lambda worker: (worker.free_samples > 0, -worker.num_lies, worker.free_samples))
            if worker.free_samples <= 0:
                if choice is workers:
                    break
                continue
            version = max(group.admission_version, worker.joined_version)
            seed = (self._first_seed + (group.group_id << 20)) % 2**64  # sample i adds i
            if group.deadline < policy_version:  # new tokens respect the bound, and those so far do not
                for index in indices:
                    group.samples[index].partial = b""
            for together in _leased_together(group, indices):
                lease = self._lease(worker, group.group_id, together, group.prompt, version, seed)
                granted[worker.worker_id].append(lease)
        return [(worker, granted[worker.worker_id]) for worker in workers if granted[worker.worker_id]]

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
                self.ledger.wait_again(duty.group_id)

    def drop(self, sample_id: SampleId, reason: str, *, detail: str = "", num_tokens: int = 0) -> None:
        """Drop a sample without an outcome, and the group if too few samples are left; an evaluation counts it 0."""
        logger.warning("drop sample %s: %s: %s", sample_id, reason, detail.partition("\n")[0])
        if purpose_of(sample_id[0]) == "eval":
            self.evaluation.fail(sample_id, num_tokens)
        else:
            self.buffer.settle(self.ledger.drop_sample(sample_id, reason, detail=detail, num_tokens=num_tokens))

    def _lease(
        self, worker: Worker, group_id: int, indices: tuple[int, ...], prompt: Prompt, min_version: int, seed: int
    ) -> Lease:
        self.newest_lease += 1
        first = self.sample((group_id, indices[0]))
        most = self.config.wire.max_message_bytes // 2  # the item and the prompt have the rest
        # Without a partial rollout of a liar, or of a run with longer messages, the sample begins anew.
        partial = b"" if first is None or len(first.partial) > most else first.partial
        lease = Lease(self.newest_lease, group_id, indices, prompt.tokens, prompt.item, min_version, seed, partial)
        grant = Grant(lease.lease_id, worker.worker_id, _oldest_version(partial, min_version), bool(partial))
        for duty in lease.duties:
            sample = self.sample(duty.sample_id)
            assert sample is not None, f"sample {duty.sample_id} has an outcome already"
            sample.lease(grant)
        worker.take(lease)
        return lease

    def _admit(self, free_samples: int, policy_version: int) -> None:
        """Admit groups while the bound, the end of the run and the workers' capacity allow."""
        algorithm, learner = self.config.algorithm, self.config.learner
        limit = num_admissible(
            policy_version=policy_version,
            max_staleness=algorithm.max_staleness,
            groups_per_step=learner.groups_per_step,
            num_train_steps=learner.num_train_steps,
            num_live=len(self.ledger.groups),
        )
        for _ in range(min(limit, -(-free_samples // algorithm.group_size))):
            prompt = self.stream.take()
            if prompt is None:
                return
            self.ledger.admit(
                prompt,
                group_size=algorithm.group_size,
                admission_version=policy_version,
                deadline=deadline(admission_version=policy_version, max_staleness=algorithm.max_staleness),
            )


def _oldest_version(partial: bytes, min_version: int) -> int:
    """Return the lowest version of an answer that continues a partial rollout."""
    try:
        turns = decode_turns(partial)
    except DecodeError:
        return min_version  # the worker cannot read the partial rollout either, and begins anew
    return min([min_version, *(int(turn.completion.versions.min(initial=min_version)) for turn in turns)])


def _leased_together(group: LedgerGroup, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the samples of each lease: all new samples together, and each partial rollout alone."""
    partial = [(index,) for index in indices if group.samples[index].partial]
    new = tuple(index for index in indices if not group.samples[index].partial)
    return [*partial, new] if new else [*partial]
