"""The learner: takes batches, trains, publishes versions, and writes records and checkpoints.

    take_batch ─► Ahead.step ─► commit (publish, settle the batch, admit) ─► metrics ─► a checkpoint at times

The training thread waits in `take_batch`, and some seconds at most for partial rollouts before a checkpoint. Intake and
broadcaster run on the intake's event loop.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config
from areal_rloo.errors import TrainingError, UnsavedError, WeightsError
from areal_rloo.intake.service import IntakeService
from areal_rloo.intake.work import Drop
from areal_rloo.learner.ahead import Ahead
from areal_rloo.learner.batches import BatchRecorder
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.recording import Recorder
from areal_rloo.learner.reporting import Reporter
from areal_rloo.learner.state import LearnerState, capture
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trace import span
from areal_rloo.trajectory import Group
from areal_rloo.weights.broadcast import Broadcaster

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Learner:
    """The training loop. `policy_version` equals the number of train steps done."""

    config: Config
    train_step: TrainStep
    tokenizer: PreTrainedTokenizerBase
    intake: IntakeService
    broadcaster: Broadcaster
    reporter: Reporter
    recorder: Recorder
    batches: BatchRecorder | None  # None without `wire.record`
    checkpoints: Checkpoints
    turn: AbstractContextManager[None]  # around a step; the engines may compute in turns with the learner
    policy_version: int
    doing: str | None = field(default=None, init=False)  # None while the learner waits for the workers, however long
    _skips_in_a_row: int = field(default=0, init=False)
    _ahead: Ahead = field(init=False)

    def __post_init__(self) -> None:
        self._ahead = Ahead(self.train_step, self.intake.upcoming)

    def run(self) -> str:
        """Train to the end; return the reason of the end.

        Raises TrainingError if too many steps in a row were not finite, UnsavedError if the last checkpoint failed.
        """
        while self.policy_version < self.config.learner.num_train_steps:
            waiting_since_s = time.monotonic()
            with span("training", "wait for a batch"), self.reporter.waiting():
                batch = self.intake.take_batch()
            wait_s = time.monotonic() - waiting_since_s
            if batch is None:
                break
            self.doing = f"step {self.policy_version + 1}"
            with span("training", self.doing), self.turn:
                self._train(batch, wait_s)
            del batch  # the buffer frees the samples a few at a time, while others arrive
            self.doing = None
        completed, unpublished = self.policy_version >= self.config.learner.num_train_steps, None
        if completed or not self.intake.draining:
            self.reporter.has_trained()
            if not completed:
                unpublished = self._commit(evaluate=True)
            if unpublished is None:
                self.intake.wait_for_evaluation()
        reason = "drained" if self.intake.draining else "completed" if completed else "end_of_data"
        self.reporter.update_totals(self.intake.statistics())
        trained = self.policy_version > 0 or self.reporter.totals.generated_tokens > 0  # else nothing to resume
        if trained and self.config.checkpoint.at_end:
            self._gather_partials()
            self.save_checkpoint()
        if not self.checkpoints.wait():
            raise UnsavedError(
                f"version {self.policy_version} could not be saved (see logs/learner.log): the steps since the newest "
                "whole checkpoint are lost; free some disk, then areal-rloo resume RUN_FOLDER"
            )
        if unpublished is not None:
            raise unpublished
        return reason

    def close(self) -> None:
        """Record the last drops; call this after a failure, too."""
        self._ahead.close()
        self.checkpoints.wait()
        if self.batches is not None:
            self.batches.close()
        self.reporter.count_failed_checkpoints()
        self.recorder.close(self._take_drops(), policy_version=self.policy_version)

    @span("training", "copy for a checkpoint")
    def save_checkpoint(self) -> None:
        """Copy the state between two steps, and begin to write a checkpoint."""
        self.reporter.update_clock()
        state = LearnerState(
            policy_version=self.policy_version,
            history=self.intake.history,
            totals=msgspec.structs.replace(self.reporter.totals),
            kl_coefficient=self.train_step.kl_coefficient,
            num_optimizer_steps=self.train_step.team.num_optimizer_steps,
            base=self.train_step.team.own.base,
            **self.intake.snapshot(capture).encoded(),
        )
        self.checkpoints.save(state, self.config, self.train_step.team, self.tokenizer, self.reporter.comparable)

    def _train(self, batch: list[Group], wait_s: float) -> None:
        if self.batches is not None:  # before the step, which may end the learner
            self.batches.append(batch, policy_version=self.policy_version)
        last = self.policy_version + 1 == self.config.learner.num_train_steps
        result = self._ahead.step(batch, policy_version=self.policy_version, last=last)
        self.reporter.skipped(result.updates.num_skipped)
        if result.updates.num_optimizer_steps == 0:
            self.intake.refuse_batch("non_finite")
            self._skips_in_a_row += 1
            logger.error("version %d: loss or gradient is not finite; the batch is dropped", self.policy_version)
            if self._skips_in_a_row > self.config.learner.max_skipped_steps:
                raise TrainingError(
                    f"{self._skips_in_a_row} steps in a row were not finite, more than learner.max_skipped_steps="
                    f"{self.config.learner.max_skipped_steps}; lower the learning rate, or look at the rewards"
                )
            return
        self._skips_in_a_row = 0
        self.policy_version += 1
        every = self.config.evaluation.every_n_versions
        evaluate = last or (every > 0 and self.policy_version % every == 0)
        every = self.config.checkpoint.every_n_steps  # and version 1: too little memory or disk shows in minutes
        saves = every > 0 and not last and (self.policy_version % every == 0 or self.policy_version == 1)
        if saves and not self.intake.draining:  # else the last checkpoint follows at once
            self._gather_partials()  # before the engines are busy with this version
        started_s = time.perf_counter()
        unpublished = self._commit(evaluate=evaluate)
        times = {"waiting": wait_s, "gather": time.perf_counter() - started_s}
        # Mostly of the version before: the broadcast of this version has just begun.
        times["broadcast"] = self.intake.call(self.broadcaster.statistics).last_broadcast_s
        with span("training", "records"):
            statistics = self.intake.statistics()
            self.reporter.train_step(batch, result, statistics, policy_version=self.policy_version, times=times)
            self.recorder.step(
                batch, result.masks, result.advantages, self._take_drops(), policy_version=self.policy_version - 1
            )
        if unpublished is not None or (saves and not self.intake.draining):
            self.save_checkpoint()
        if unpublished is not None:
            raise unpublished

    @span("training", "gather weights")
    def _commit(self, *, evaluate: bool) -> WeightsError | None:
        """Make the version current, and publish it if due. Return an error to raise after records and a checkpoint."""
        is_due, team = self.policy_version % self.config.weights.publish_every_n_steps == 0, self.train_step.team
        try:
            self.intake.commit(self.policy_version, team.gather_weights, evaluate=evaluate, publish=evaluate or is_due)
        except WeightsError as error:
            return error
        return None

    def _gather_partials(self) -> None:
        if self.config.checkpoint.partial_rollouts:
            self.intake.gather_partials(self.config.partials_timeout_s)

    def _take_drops(self) -> list[Drop]:
        return self.intake.snapshot(lambda ledger, _: ledger.take_drops())
