"""Admission and leases: which groups may start, and which worker generates which samples.

The intake calls `grants` after every event and sends the leases. Admission follows the staleness bound and the free
capacity of the workers. Samples that a worker lost are leased again before a group is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from areal_rloo.algorithm.staleness import deadline, num_admissible
from areal_rloo.config import Config
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Worker
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.trajectory import SampleId, purpose_of
from areal_rloo.wire.messages import Lease, Leases


class Leasing:
    """Decides on leases. `exhausted` is True after the prompt stream has ended."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        buffer: Buffer,
        stream: PromptStream,
        evaluation: Evaluation,
        last_version: int,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._buffer = buffer
        self._stream = stream
        self._evaluation = evaluation
        self._last_version = last_version
        self.exhausted = False

    def grants(self, workers: list[Worker], policy_version: int) -> list[tuple[Worker, Leases]]:
        """Grant all leases possible now: evaluation first, then lost samples, then groups not yet started."""
        if not workers:
            return []
        leases: dict[str, list[Lease]] = {worker.worker_id: [] for worker in workers}
        for number, lease in enumerate(self._evaluation.take_leases()):
            leases[workers[number % len(workers)].worker_id].append(lease)
        self._admit(sum(max(0, worker.free_samples) for worker in workers), policy_version)
        room = {worker.worker_id: worker.free_samples for worker in workers}
        joined = {worker.worker_id: worker.joined_version for worker in workers}
        for group, indices in self._ledger.waiting():
            worker_id = max(room, key=lambda name: room[name])
            if room[worker_id] <= 0:
                break
            for index in indices:
                self._ledger.lease((group.group_id, index), worker_id)
            room[worker_id] -= len(indices)
            leases[worker_id].append(
                Lease(
                    group_id=group.group_id,
                    sample_indices=indices,
                    prompt_tokens=group.prompt.tokens,
                    item=group.prompt.item,
                    min_version=max(group.admission_version, joined[worker_id]),
                    seed=_lease_seed(self._config.run.seed, group.group_id),
                )
            )
        return [(worker, worker.take(leases[worker.worker_id])) for worker in workers if leases[worker.worker_id]]

    def lose(self, lost: Iterable[SampleId]) -> None:
        """Queue lost samples for another lease; drop a sample after `wire.max_attempts` leases."""
        for sample_id in sorted(lost):
            if purpose_of(sample_id[0]) == "eval":
                self._evaluation.lose(sample_id)
            elif self._ledger.lose(sample_id) and self._ledger.num_leases(sample_id) >= self._config.wire.max_attempts:
                self.drop(sample_id, "max_attempts")

    def drop(self, sample_id: SampleId, reason: str, *, detail: str = "") -> None:
        """Drop a sample, and the group if too few samples are left."""
        if self._ledger.drop_sample(sample_id, reason, detail=detail):
            self._buffer.settle(self._ledger.groups[sample_id[0]])

    def _admit(self, free_samples: int, policy_version: int) -> None:
        """Admit groups while the bound, the end of the run and the workers' capacity allow."""
        algorithm = self._config.algorithm
        # Capped at last_version * B groups in all: more groups would never be trained on.
        limit = num_admissible(
            policy_version=min(policy_version, self._last_version - 1 - algorithm.max_staleness),
            max_staleness=algorithm.max_staleness,
            groups_per_step=self._config.learner.groups_per_step,
            admitted=self._ledger.admitted_groups,
            dropped=self._ledger.dropped_groups,
        )
        self.exhausted = self.exhausted and self._stream.num_returned == 0
        if limit <= 0 or self.exhausted:
            return
        free_samples -= sum(len(indices) for _, indices in self._ledger.waiting())
        for _ in range(min(limit, -(-free_samples // algorithm.group_size))):
            prompt = self._stream.take()
            if prompt is None:
                self.exhausted = True
                return
            self._ledger.admit(
                prompt,
                group_size=algorithm.group_size,
                admission_version=policy_version,
                deadline=deadline(admission_version=policy_version, max_staleness=algorithm.max_staleness),
            )


def _lease_seed(run_seed: int, group_id: int) -> int:
    """Return the seed of a group. Sample i adds i; groups are 2**20 seeds apart, and run seeds 2**44."""
    return (run_seed << 44) + (group_id << 20)
