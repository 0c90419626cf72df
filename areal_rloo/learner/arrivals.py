"""What rollout workers bring, into the ledger: trajectories, and samples that will never be finished.

The intake calls it for every message of the kind, on its loop; nothing here waits.
"""

from __future__ import annotations

from areal_rloo.errors import RewardError
from areal_rloo.learner.buffer import Buffer
from areal_rloo.learner.evaluation import Evaluation
from areal_rloo.learner.failures import RewardFailures
from areal_rloo.learner.leasing import Leasing
from areal_rloo.learner.ledger import Ledger, by_sample
from areal_rloo.learner.workers import Workers
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId
from areal_rloo.wire.messages import SampleFailed, TrajectoryBatch

logger = get_logger(__name__)


class Arrivals:
    """Takes samples off their worker's account and writes what became of them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        buffer: Buffer,
        leasing: Leasing,
        evaluation: Evaluation,
        workers: Workers,
        failures: RewardFailures,
        most_tokens: int,
    ) -> None:
        """`most_tokens`: of a trajectory that can be trained on."""
        self._ledger = ledger
        self._buffer = buffer
        self._leasing = leasing
        self._evaluation = evaluation
        self._workers = workers
        self._failures = failures
        self._most_tokens = most_tokens

    def finished(self, batch: TrajectoryBatch) -> None:
        """Samples came, each with all of its trajectories."""
        worker = self._workers.alive.get(batch.worker_id)
        samples = by_sample(batch.trajectories)
        self._failures.scored(len(samples))
        for sample_id, trajectories in samples.items():
            if worker is not None:
                worker.release(sample_id)
            longest = max(trajectory.num_tokens for trajectory in trajectories)
            if sample_id[0] < 0:
                self._evaluation.finish(trajectories)
            elif longest - 1 > self._most_tokens:  # the last token predicts nothing
                self._refuse(sample_id, longest)
            elif (group := self._ledger.finish(trajectories)) is not None:
                self._buffer.settle(group)

    def refuse_too_long(self) -> None:
        """Of what is buffered, as a checkpoint has it: its run may have had longer rows."""
        for group_id, group in list(self._ledger.groups.items()):
            for sample_index, sample in list(group.samples.items()):
                longest = max((trajectory.num_tokens for trajectory in sample.trajectories), default=0)
                if longest - 1 > self._most_tokens:
                    self._refuse((group_id, sample_index), longest)

    def _refuse(self, sample_id: SampleId, num_tokens: int) -> None:
        detail = (
            f"sample {sample_id} has {num_tokens} tokens, more than learner.microbatch_tokens={self._most_tokens} holds"
        )
        logger.error("%s: it is dropped; raise that, or lower the length of prompts and completions", detail)
        self._leasing.drop(sample_id, "too_long", detail=detail)

    def failed(self, message: SampleFailed) -> None:
        """A sample will never come.

        Raises:
            UserError: it is one too many.
        """
        sample_id = (message.group_id, message.sample_index)
        error = RewardError(message.reason, message.detail)
        logger.warning("sample %s is dropped: %s: %s", sample_id, error.reason, error.summary)
        if (worker := self._workers.alive.get(message.worker_id)) is not None:
            worker.release(sample_id)
        if message.group_id < 0:
            self._evaluation.fail(sample_id)
        else:
            detail = message.detail
            if message.completion:
                detail += f"\ncompletion: {message.completion}"
            self._leasing.drop(sample_id, message.reason, detail=detail)
        self._failures.failed(error)
