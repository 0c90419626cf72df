"""Report a run: metrics.jsonl, the metrics endpoint, the totals over restarts, and summary.json.

In: the numbers of each train step (`StepResult`), the statistics of the intake, evaluations. Out: a record for each
train step and each evaluation; a summary at the end. The training thread calls everything here except
`Reporter.evaluation`, which the intake's loop calls: a separate thread writes the records, in the order of the calls.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from areal_rloo.config import Config
from areal_rloo.errors import DataError
from areal_rloo.intake.work import IntakeStatistics
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.state import Totals
from areal_rloo.learner.train_step import StepResult
from areal_rloo.telemetry.bound import idle_share
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.metrics import LearnerMetrics, MetricsFile, read_records
from areal_rloo.telemetry.progress import evaluation_line
from areal_rloo.telemetry.records import EvalRecord, MovingNumbers, Record, TrainRecord
from areal_rloo.telemetry.summary import Summary
from areal_rloo.telemetry.words import Words
from areal_rloo.trajectory import Group
from areal_rloo.wire.messages import MOST_COUNT, MOST_SECONDS

logger = get_logger(__name__)

_TOTALS = (
    *("wall_s", "failed_checkpoints", "learner_idle_s", "rollout_idle_s", "rollout_busy_s", "decoding_s"),
    "generated_tokens",
)
_LAST_STEPS = 10
_FIRST_STEP_S = 360.0  # assumed before the first step, which loads and compiles
_MOST_PARTS = 200  # labels of reward parts: workers send them


class PaceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """When the last train step ended, and how long one takes: for the alarm about a run that stands still.

    The second longest step counts, so a single standstill does not hide the next; the longest of the first two.
    """

    metrics_prefix: ClassVar[str] = ""

    last_train_step_timestamp_s: Annotated[float, Metric("Time of the last train step, or of the start", "s")]
    last_evaluation_timestamp_s: Annotated[float, Metric("Time of the last evaluation, or of the start", "s")]
    train_steps_left: Annotated[int, Metric("Train steps until the end of the run")]
    long_train_step_s: Annotated[float, Metric("Second longest of the last 10 train steps, with the waits", "s")]


def records_so_far(path: Path) -> list[Record]:
    """Read metrics.jsonl; nothing if there are records of another version of areal_rloo: no reason to end a run."""
    try:
        return read_records(path)
    except DataError as error:
        logger.warning("the records so far are not shown: %s", error)
        return []


@dataclass(kw_only=True)
class Reporter:
    """Writes the records of a run and adds up the totals."""

    file: MetricsFile
    registry: InitVar[CollectorRegistry]  # serves the newest records
    health: Health
    records: InitVar[Sequence[Record]]  # of the run so far, before a restart
    totals: Totals  # sums over the whole run, restarts included; checkpoints keep them
    checkpoints: Checkpoints
    config: Config
    policy_version: InitVar[int] = 0  # at the start

    def __post_init__(self, registry: CollectorRegistry, records: Sequence[Record], policy_version: int) -> None:
        for record in records:
            self.health.look(record)
        start = {"num_train_steps": policy_version, "skipped_steps": self.totals.skipped_steps}
        self.metrics = LearnerMetrics(registry, start)
        self.evaluations = [record for record in records if isinstance(record, EvalRecord)]
        self._steps_left = self.config.learner.num_train_steps - policy_version
        self._looking = threading.Lock()
        self._stepped = self._evaluated = datetime.now(UTC)
        self._steps_s = deque([_FIRST_STEP_S, *_step_times_s(records)], maxlen=_LAST_STEPS)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._num_missing = 0  # records since the last one that was written; of the writer's thread
        self._before = msgspec.structs.replace(self.totals)
        self._first_step: IntakeStatistics | None = None
        self._num_steps = 0  # of this process
        self._waits_since_s: float | None = None  # the learner, for a batch
        self._parts = Words(_MOST_PARTS)
        self._started_s = math.inf

    def start_clock(self) -> None:
        """Start to measure `wall_s` and the rates of the first record: the learner is ready to train."""
        self._started_s = self._record_s = time.monotonic()
        self._recorded = msgspec.structs.replace(self.totals)

    def evaluation(self, record: EvalRecord) -> None:
        """Write an evaluation, without waiting for the disk."""
        logger.info("%s", evaluation_line(record))
        self.evaluations.append(record)
        self._append(record).add_done_callback(_log_error)
        self.metrics.evaluation(record)
        self._evaluated = datetime.now(UTC)
        self._look(record)

    def train_step(
        self,
        batch: Sequence[Group],
        result: StepResult,
        statistics: IntakeStatistics,
        *,
        policy_version: int,
        times: Mapping[str, float],
    ) -> None:
        """Write the record of a train step, which published this version.

        `times`: seconds of the step's parts outside `TrainStep`; `waiting` is the wait for the batch.
        """
        totals, masks = self.totals, result.masks
        self._first_step = self._first_step or statistics
        totals.trained_tokens += masks.num_tokens
        totals.masked_tokens += masks.num_stale
        for value, count in masks.staleness_tokens.items():
            totals.staleness_tokens[value] = totals.staleness_tokens.get(value, 0) + count
        self.update_totals(statistics)
        before, elapsed_s = self._recorded, time.monotonic() - self._record_s
        self._record_s, self._recorded = self._record_s + elapsed_s, msgspec.structs.replace(totals)
        rollouts_wait = idle_share(totals, before, unknown=math.nan)
        self._num_steps += 1
        record = TrainRecord(
            num_train_steps=policy_version,
            policy_version=policy_version,
            wait_s=times["waiting"],
            skipped_steps=totals.skipped_steps,
            steps_since_start=self._num_steps,
            **msgspec.structs.asdict(self._moving(totals, statistics)),
            generated_tokens_per_s=(totals.generated_tokens - before.generated_tokens) / elapsed_s,
            trained_tokens_per_s=masks.num_tokens / elapsed_s,
            idle_share={"learner": min(1.0, times["waiting"] / elapsed_s), "rollout": rollouts_wait},
            **batch_numbers(batch, label=self._parts.label),
            **result.numbers,
            **{**result.measured, "times_s": {**result.measured["times_s"], **times}},
        )
        self._append(record).result()
        self.metrics.train_step(record)
        self._stepped = datetime.now(UTC)
        self._steps_s.append(elapsed_s)
        self._steps_left = self.config.learner.num_train_steps - policy_version
        self._look(record)

    def has_trained(self) -> None:
        """Note that no step follows, perhaps because the data has ended."""
        self._steps_left = 0

    def skipped(self, num_steps: int) -> None:
        """Count skipped optimizer steps."""
        self.totals.skipped_steps += num_steps
        self.metrics.skipped_steps(self.totals.skipped_steps)

    def comparable(self) -> list[EvalRecord]:
        """Return the evaluations since the last change of their set; safe on any thread."""
        return self.health.breaks.comparable(self.evaluations.copy())

    def pace(self) -> PaceStatistics:
        """Return the pace of the run; safe on any thread."""
        return PaceStatistics(
            last_train_step_timestamp_s=self._stepped.timestamp(),
            last_evaluation_timestamp_s=self._evaluated.timestamp(),
            train_steps_left=max(0, self._steps_left),
            long_train_step_s=_long_s(self._steps_s.copy()),
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as a wait of the learner for a batch."""
        since_s = self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None
            self.totals.learner_idle_s += time.monotonic() - since_s

    def follow(self, start: IntakeStatistics, read: Callable[[], IntakeStatistics]) -> None:
        """Serve the moving numbers of each scrape, counted from the start of this process; `read` as in `_Served`."""

        def moving(now: IntakeStatistics) -> MovingNumbers:
            return self._moving(self._totals_now(now), now)

        self.metrics.follow(moving(start), lambda: moving(read()))

    def update_totals(self, statistics: IntakeStatistics) -> None:
        """Bring the totals up to this moment."""
        now = self._totals_now(statistics)
        for name in _TOTALS:
            setattr(self.totals, name, getattr(now, name))

    def _totals_now(self, statistics: IntakeStatistics) -> Totals:
        """Return the totals at this moment, with the learner's present wait."""
        now, before, waits_since_s = msgspec.structs.replace(self.totals), self._before, self._waits_since_s
        if waits_since_s is not None:
            now.learner_idle_s += time.monotonic() - waits_since_s
        if (first := self._first_step) is not None:
            idle_s = statistics.rollout_idle_s - first.rollout_idle_s
            now.rollout_idle_s = min(before.rollout_idle_s + idle_s, MOST_SECONDS)
        now.rollout_busy_s = min(before.rollout_busy_s + statistics.rollout_busy_s, MOST_SECONDS)
        now.decoding_s = min(before.decoding_s + statistics.decoding_s, MOST_SECONDS)
        num_generated = before.generated_tokens + statistics.generated_tokens  # as the workers say
        now.generated_tokens = min(num_generated, MOST_COUNT)
        now.failed_checkpoints = self._failed_checkpoints
        now.wall_s = self._wall_s
        return now

    @property
    def _failed_checkpoints(self) -> int:
        return self._before.failed_checkpoints + self.checkpoints.num_failed

    @property
    def _wall_s(self) -> float:
        return self._before.wall_s + max(0.0, time.monotonic() - self._started_s)

    def _moving(self, totals: Totals, statistics: IntakeStatistics) -> MovingNumbers:
        return MovingNumbers(
            **{name: getattr(totals, name) for name in _TOTALS},
            num_workers=statistics.num_workers,
            weights_behind=statistics.num_behind,
            filtered_prompts=statistics.filtered_prompts,
            epoch=statistics.epoch,
            truncated_prompts=statistics.truncated_prompts,
            ledger=statistics.ledger,
        )

    def update_clock(self) -> None:
        """Bring `wall_s` of the totals up to this moment."""
        self.totals.wall_s = self._wall_s

    def count_failed_checkpoints(self) -> None:
        """Bring `failed_checkpoints` of the totals up to this moment."""
        self.totals.failed_checkpoints = self._failed_checkpoints

    def write_summary(
        self,
        path: Path,
        statistics: IntakeStatistics,
        *,
        policy_version: int,
        warm_start_s: float,
        exit_reason: str,
    ) -> None:
        """Write summary.json."""
        totals = self.totals
        Summary(
            exit_reason=exit_reason,
            policy_version=policy_version,
            evaluations=self.evaluations,
            ledger=statistics.ledger,
            staleness_tokens=totals.staleness_tokens,
            trained_tokens=totals.trained_tokens,
            masked_tokens=totals.masked_tokens,
            generated_tokens=totals.generated_tokens,
            warm_start_s=warm_start_s,
            wall_s=totals.wall_s,
            learner_idle_s=totals.learner_idle_s,
            rollout_idle_s=totals.rollout_idle_s,
            rollout_busy_s=totals.rollout_busy_s,
            skipped_steps=totals.skipped_steps,
            failed_checkpoints=totals.failed_checkpoints,
        ).write(path)

    def _look(self, record: Record) -> None:
        with self._looking:  # evaluations come on the intake's loop
            lines = self.health.look(record)
        for line in lines:
            logger.warning("%s", line)

    def close(self) -> None:
        """Wait for the last record; no evaluation may follow."""
        self._writer.shutdown()

    def _append(self, record: TrainRecord | EvalRecord) -> Future[None]:
        return self._writer.submit(self._write, record)

    def _write(self, record: TrainRecord | EvalRecord) -> None:
        try:
            self.file.append(record)
        except OSError as error:  # a full disk must not end the run
            self._num_missing += 1
            logger.error("a record is missing from metrics.jsonl: %s", error)
            return
        if self._num_missing > 0:
            logger.warning("metrics.jsonl is written again; %d records are missing", self._num_missing)
            self._num_missing = 0


def _step_times_s(records: Iterable[Record]) -> Iterator[float]:
    """Give the times between the train steps of a run so far."""
    ends_s = [record.wall_s for record in records if isinstance(record, TrainRecord)]
    yield from (later - earlier for earlier, later in itertools.pairwise(ends_s) if later > earlier)


def _long_s(steps_s: Iterable[float]) -> float:
    """Return the second longest step; the longest of two, because the first one is assumed."""
    ordered = sorted(steps_s)
    return ordered[-1] if len(ordered) < 3 else ordered[-2]


def _log_error(written: Future[None]) -> None:
    if (error := written.exception()) is not None:
        logger.error("an evaluation is missing from metrics.jsonl", exc_info=error)


def batch_numbers(batch: Sequence[Group], *, label: Callable[[str], str] = str) -> dict[str, Any]:
    """Give the rewards before shaping, the lengths and the endings of a batch, by field of TrainRecord.

    `label`: takes the name of a reward part.
    """
    trajectories = [trajectory for group in batch for trajectory in group.trajectories]
    samples = [sample for group in batch for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(trajectory.completion.tokens) for trajectory in trajectories])
    longest = [max(len(trajectory.completion.tokens) for trajectory in group.trajectories) for group in batch]
    lower, median, upper = np.quantile(rewards, [0.1, 0.5, 0.9])
    equal = [len({trajectory.reward for trajectory in group.trajectories}) == 1 for group in batch]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_lower_decile": float(lower),
        "reward_median": float(median),
        "reward_upper_decile": float(upper),
        "reward_parts": _means((label(name), x) for each in samples for name, x in each.reward_parts.items()),
        "reward_by_source": _means((group.source, sample.reward) for group in batch for sample in group.samples),
        "zero_variance_group_share": sum(equal) / len(equal),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        "completion_tokens_std": float(lengths.std()),
        "longest_of_group_mean": float(np.mean(longest)),
        "truncated_share": float(np.mean([t.completion.finish_reason == "length" for t in trajectories])),
        "spanning_share": float(np.mean([t.completion.versions[0] < t.completion.versions[-1] for t in trajectories])),
    }


def _means(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in named:
        values[name].append(value)
    return {name: float(np.mean(every)) for name, every in values.items()}
