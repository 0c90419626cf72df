"""The learner: takes batches, steps, publishes, and writes down what happened.

    take_batch ─► TrainStep.step ─► Broadcaster.publish ─► Intake.advance ─► metrics ─► checkpoint, now and then

The training thread waits in `take_batch` only. Intake and broadcast run on threads of their own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config
from areal_rloo.errors import TrainingError
from areal_rloo.learner.checkpoint import Checkpoints, Totals, capture
from areal_rloo.learner.intake import Intake, IntakeStatistics
from areal_rloo.learner.ledger import Drop
from areal_rloo.learner.numbers import batch_numbers, step_numbers
from areal_rloo.learner.recording import Recorder
from areal_rloo.learner.train_step import StepResult, TrainStep
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metrics import LearnerMetrics, MetricsFile
from areal_rloo.telemetry.progress import evaluation_line
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.trajectory import Group
from areal_rloo.weights.broadcast import Broadcaster

logger = get_logger(__name__)

_EVALUATION_FIELDS = (
    "name",
    "policy_version",
    "accuracy",
    "num_prompts",
    "num_samples",
    "pass_share",
    "majority_share",
)


@dataclass(slots=True)
class _Interval:
    """Where the previous record stood, for rates."""

    now_s: float
    generated_tokens: int = 0


class Reporter:
    """Writes records to metrics.jsonl and the metrics endpoint; keeps the evaluations for the summary."""

    def __init__(self, file: MetricsFile, metrics: LearnerMetrics, evaluations: list[EvalRecord]) -> None:
        self._file = file
        self._metrics = metrics
        self.evaluations = evaluations

    def train_step(self, record: TrainRecord) -> None:
        self._append(record)
        self._metrics.train_step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Called on the intake's thread."""
        logger.info("%s", evaluation_line(record))
        self.evaluations.append(record)
        self._append(record)
        self._metrics.evaluation(record)

    def _append(self, record: TrainRecord | EvalRecord) -> None:
        try:
            self._file.append(record)
        except OSError as error:  # a full disk must not end the run
            logger.error("a record is missing from metrics.jsonl: %s", error)


class Learner:
    """The training loop. `policy_version` equals the number of train steps done."""

    def __init__(
        self,
        config: Config,
        *,
        train_step: TrainStep,
        tokenizer: PreTrainedTokenizerBase,
        intake: Intake,
        broadcaster: Broadcaster,
        reporter: Reporter,
        recorder: Recorder,
        checkpoints: Checkpoints,
        policy_version: int,
        totals: Totals,
    ) -> None:
        self._config = config
        self._train_step = train_step
        self._team = train_step.team
        self._tokenizer = tokenizer
        self._intake = intake
        self._broadcaster = broadcaster
        self._reporter = reporter
        self._recorder = recorder
        self._checkpoints = checkpoints
        self.policy_version = policy_version
        self.totals = totals
        self._skips_in_a_row = 0
        self._started_s = time.monotonic()
        self._before = msgspec.structs.replace(totals)
        self._first_step: IntakeStatistics | None = None
        self._interval = _Interval(self._started_s)

    @property
    def evaluations(self) -> list[EvalRecord]:
        """Every evaluation of the run so far."""
        return self._reporter.evaluations

    def run(self) -> str:
        """Train to the end; gives the reason it ended.

        Raises:
            TrainingError: too many steps in a row were not finite, or the last checkpoint could not be written.
        """
        reason = "completed"
        while self.policy_version < self._config.learner.num_train_steps:
            waiting_since_s = time.monotonic()
            batch = self._intake.take_batch()
            wait_s = time.monotonic() - waiting_since_s
            self.totals.learner_idle_s += wait_s
            if batch is None:
                reason = "drained" if self._intake.draining else "end_of_data"
                break
            self._train(batch, wait_s)
        if reason != "drained":
            if reason == "end_of_data":
                self._intake.advance(self.policy_version, evaluate=True)
            self._intake.wait_for_evaluation()
            reason = "drained" if self._intake.draining else reason
        self._update_totals(self._intake.statistics())
        self.save_checkpoint()
        if not self._checkpoints.wait():
            raise TrainingError(
                f"version {self.policy_version} could not be saved (see logs/learner.log), and with it all since the "
                "newest whole checkpoint; free some disk, then --resume goes on from there"
            )
        return reason

    def close(self) -> None:
        """Write down what was dropped last; also after a failure, when it is what one wants to see."""
        self._checkpoints.wait()
        self._count_failed_checkpoints()
        self._recorder.close(self._take_drops(), policy_version=self.policy_version)

    def save_checkpoint(self) -> None:
        """Copy this moment, between two steps, and begin to write it."""
        self.totals.wall_s = self._before.wall_s + time.monotonic() - self._started_s
        state = self._intake.snapshot(
            lambda ledger, stream: capture(
                ledger,
                stream,
                policy_version=self.policy_version,
                seed=self._config.run.seed,
                totals=msgspec.structs.replace(self.totals),
                kl_coefficient=self._train_step.kl_coefficient,
                num_optimizer_steps=self._team.num_optimizer_steps,
            )
        )
        self._checkpoints.save(state, team=self._team, tokenizer=self._tokenizer)

    def _train(self, batch: list[Group], wait_s: float) -> None:
        result = self._train_step.step(batch, policy_version=self.policy_version)
        self.totals.skipped_steps += result.num_skipped
        if result.num_optimizer_steps == 0:
            self._intake.settle_batch(refused="non_finite")
            self._skips_in_a_row += 1
            logger.error("version %d: loss or gradient is not finite; the batch is dropped", self.policy_version)
            if self._skips_in_a_row > self._config.learner.max_skipped_steps:
                raise TrainingError(
                    f"{self._skips_in_a_row} steps in a row were not finite, more than learner.max_skipped_steps="
                    f"{self._config.learner.max_skipped_steps}; lower the learning rate, or look at the rewards"
                )
            return
        self._skips_in_a_row = 0
        self.policy_version += 1
        result.times |= {"waiting": wait_s, "gather": self._publish()}
        self._intake.settle_batch(refused=None)
        last = self.policy_version == self._config.learner.num_train_steps
        every = self._config.evaluation.every_n_versions
        self._intake.advance(self.policy_version, evaluate=last or (every > 0 and self.policy_version % every == 0))
        self._report(batch, result, wait_s)
        self._recorder.step(batch, result, self._take_drops(), policy_version=self.policy_version - 1)
        every = self._config.checkpoint.every_n_steps
        if every > 0 and self.policy_version % every == 0 and not last:
            self.save_checkpoint()

    def _publish(self) -> float:
        """Gather this version for the broadcast; gives the seconds it took."""
        started_s = time.perf_counter()
        self._broadcaster.publish(self.policy_version, self._team.gather_weights)
        return time.perf_counter() - started_s

    def _take_drops(self) -> list[Drop]:
        return self._intake.snapshot(lambda ledger, _: ledger.take_drops())

    def _count_failed_checkpoints(self) -> None:
        self.totals.failed_checkpoints = self._before.failed_checkpoints + self._checkpoints.num_failed

    def _update_totals(self, statistics: IntakeStatistics) -> None:
        first, before = self._first_step, self._before
        if first is not None:
            idle_s = (statistics.rollout_idle_s - first.rollout_idle_s) / self._config.rollout.num_workers
            self.totals.rollout_idle_s = before.rollout_idle_s + idle_s
        self._count_failed_checkpoints()
        self.totals.generated_tokens = before.generated_tokens + statistics.generated_tokens
        self.totals.wall_s = before.wall_s + time.monotonic() - self._started_s

    def _report(self, batch: list[Group], result: StepResult, wait_s: float) -> None:
        statistics = self._intake.statistics()
        if self._first_step is None:
            self._first_step = statistics
        totals = self.totals
        totals.trained_tokens += result.num_tokens
        totals.masked_tokens += result.num_stale_tokens
        for value, count in result.staleness_tokens.items():
            totals.staleness_tokens[value] = totals.staleness_tokens.get(value, 0) + count
        self._update_totals(statistics)
        now_s = time.monotonic()
        elapsed_s = now_s - self._interval.now_s
        generated = totals.generated_tokens - self._interval.generated_tokens
        self._interval = _Interval(now_s, totals.generated_tokens)
        result.times["broadcast"] = self._broadcaster.statistics().last_broadcast_s  # of the version before, as a rule
        self._reporter.train_step(
            TrainRecord(
                num_train_steps=self.policy_version,
                policy_version=self.policy_version,
                wall_s=totals.wall_s,
                skipped_steps=totals.skipped_steps,
                failed_checkpoints=totals.failed_checkpoints,
                wait_s=wait_s,
                learner_idle_s=totals.learner_idle_s,
                rollout_idle_s=totals.rollout_idle_s,
                generated_tokens=totals.generated_tokens,
                generated_tokens_per_s=generated / elapsed_s,
                trained_tokens_per_s=result.num_tokens / elapsed_s,
                num_workers=statistics.num_workers,
                filtered_prompts=statistics.filtered_prompts,
                truncated_prompts=statistics.truncated_prompts,
                ledger=statistics.ledger,
                **batch_numbers(batch),
                **step_numbers(result),
            )
        )


def write_summary(
    path: Path,
    *,
    learner: Learner,
    statistics: IntakeStatistics,
    warm_start_s: float,
    exit_reason: str,
) -> None:
    """summary.json: the run in one page of numbers. Counts in samples or tokens, times in seconds."""
    totals = learner.totals
    num_trained = max(1, totals.trained_tokens)
    summary = {
        "exit_reason": exit_reason,
        "num_train_steps": learner.policy_version,
        "policy_version": learner.policy_version,
        "evaluation": [
            {field: getattr(record, field) for field in _EVALUATION_FIELDS} for record in learner.evaluations
        ],
        "ledger": statistics.ledger,
        "staleness": {
            "max_trained": max(totals.staleness_tokens, default=0),
            "mean_trained": sum(s * n for s, n in totals.staleness_tokens.items()) / num_trained,
            "masked_token_share": totals.masked_tokens / max(1, totals.trained_tokens + totals.masked_tokens),
            "by_value": {str(s): totals.staleness_tokens[s] for s in sorted(totals.staleness_tokens)},
        },
        "tokens": {"generated": totals.generated_tokens, "trained": totals.trained_tokens},
        "time_s": {
            "warm_start": warm_start_s,
            "wall": totals.wall_s,
            "learner_idle": totals.learner_idle_s,
            "rollout_idle": totals.rollout_idle_s,
        },
        "skipped_steps": totals.skipped_steps,
        "failed_checkpoints": totals.failed_checkpoints,
    }
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    unfinished.rename(path)
