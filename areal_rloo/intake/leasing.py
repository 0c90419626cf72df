"""Admission and leases: which groups may start, and which worker generates which samples.

The intake calls `grants` after every event and sends the leases. Admission follows the staleness bound and the free
capacity of the workers. Lost samples take their room before new groups are admitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_rloo.algorithm.staleness import deadline, num_admissible
from areal_rloo.config import Config
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Worker
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.trajectory import SampleId, purpose_of
from areal_rloo.wire.messages import Lease, Leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Leasing:
    """Decides on leases."""

    config: Config
    ledger: Ledger
    buffer: Buffer
    stream: PromptStream
    evaluation: Evaluation

    def grants(self, workers: list[Worker], policy_version: int) -> list[tuple[Worker, Leases]]:
        """Grant all leases possible now: evaluation first, then lost samples, then groups not yet started."""
        if not workers:
            return []
        leases: dict[str, list[Lease]] = {worker.worker_id: [] for worker in workers}
        for number, lease in enumerate(self.evaluation.take_leases()):
            leases[workers[number % len(workers)].worker_id].append(lease)
        self._admit(sum(max(0, worker.free_samples) for worker in workers), policy_version)
        room = {worker.worker_id: worker.free_samples for worker in workers}
        for group, indices in self.ledger.waiting():
            worker = max(workers, key=lambda worker: room[worker.worker_id])
            if room[worker.worker_id] <= 0:
                break
            for index in indices:
                self.ledger.lease((group.group_id, index), worker.worker_id)
            room[worker.worker_id] -= len(indices)
            leases[worker.worker_id].append(
                Lease(
                    group_id=group.group_id,
                    sample_indices=indices,
                    prompt_tokens=group.prompt.tokens,
                    item=group.prompt.item,
                    min_version=max(group.admission_version, worker.joined_version),
                    # Sample i adds i; groups are 2**20 seeds apart, and run seeds 2**44.
                    seed=(self.config.run.seed << 44) + (group.group_id << 20),
                )
            )
        return [(worker, worker.take(leases[worker.worker_id])) for worker in workers if leases[worker.worker_id]]

    def lose(self, lost: Iterable[SampleId]) -> None:
        """Queue lost samples for another lease; drop a sample after `wire.max_attempts` leases."""
        for sample_id in sorted(lost):
            if purpose_of(sample_id[0]) == "eval":
                self.evaluation.lose(sample_id)
            elif self.ledger.lose(sample_id) >= self.config.wire.max_attempts:
                self.drop(sample_id, "max_attempts")

    def drop(self, sample_id: SampleId, reason: str, *, detail: str = "") -> None:
        """Drop a sample, and the group if too few samples are left."""
        if self.ledger.drop_sample(sample_id, reason, detail=detail):
            self.buffer.settle(self.ledger.groups[sample_id[0]])

    def _admit(self, free_samples: int, policy_version: int) -> None:
        """Admit groups while the bound, the end of the run and the workers' capacity allow."""
        algorithm, learner = self.config.algorithm, self.config.learner
        # Capped at num_train_steps * B groups in all: more groups would never be trained on.
        limit = num_admissible(
            policy_version=min(policy_version, learner.num_train_steps - 1 - algorithm.max_staleness),
            max_staleness=algorithm.max_staleness,
            groups_per_step=learner.groups_per_step,
            admitted=self.ledger.admitted_groups,
            dropped=self.ledger.dropped_groups,
        )
        free_samples -= sum(len(indices) for _, indices in self.ledger.waiting())
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
