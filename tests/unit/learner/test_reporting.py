"""The records of a run: rates and totals, also after a resume."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from support.train_steps import ragged_groups, spied_step, step_config

from areal_rloo.config import load_config
from areal_rloo.decoding import from_msgpack
from areal_rloo.intake.work import IntakeStatistics
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.reporting import Reporter
from areal_rloo.learner.state import Totals
from areal_rloo.telemetry.bound import shares_of
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.metrics import MetricsFile, read_records
from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, TrainRecord


def _reporter(
    file: MetricsFile, totals: Totals, registry: CollectorRegistry | None = None, records: Sequence[TrainRecord] = ()
) -> Reporter:
    config = load_config("quickstart.yaml")
    return Reporter(
        file=file,
        registry=registry or CollectorRegistry(),
        health=Health(config),
        records=records,
        totals=totals,
        checkpoints=Checkpoints(Path("unused")),
        config=config,
        policy_version=4,
    )


def _statistics(ledger: LedgerCounts, **numbers: float) -> IntakeStatistics:
    """Return statistics that are 0, except for these."""
    none = {field.name: 0 for field in dataclasses.fields(IntakeStatistics)}
    return IntakeStatistics(**{**none, "ledger": ledger, "num_workers": 1, **numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [0, 1_000_000])
def test_a_rate_counts_the_tokens_since_the_previous_record(
    tmp_path: Path, tiny_folders: dict[str, Path], ledger_counts: LedgerCounts, before: int
) -> None:
    """The first record of a resumed run counts no token of the time before the resume."""
    groups = ragged_groups()
    _, result = spied_step(tiny_folders["qwen2"], groups, step_config())
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals(generated_tokens=before))
    reporter.start_clock()
    for version, num_generated in ((1, 150), (2, 400)):
        now = _statistics(ledger_counts, generated_tokens=num_generated)
        reporter.train_step(groups, result, now, policy_version=version, times={"waiting": 0.0})
    reporter.close()
    file.close()
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if isinstance(r, TrainRecord)]
    assert [record.generated_tokens for record in records] == [before + 150, before + 400]
    # Both rates of a record are over the same seconds.
    ratios = [record.generated_tokens_per_s / record.trained_tokens_per_s for record in records]
    assert ratios == pytest.approx([150 / result.masks.num_tokens, 250 / result.masks.num_tokens])


def test_the_rollouts_wait_a_share_of_the_time_of_the_workers_there_are(
    tmp_path: Path, tiny_folders: dict[str, Path], ledger_counts: LedgerCounts
) -> None:
    """The config has one worker; eight report, and then none. No worker waits for more than all of its time."""
    groups = ragged_groups()
    _, result = spied_step(tiny_folders["qwen2"], groups, step_config())
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals())
    reporter.start_clock()
    times = [(30.0, 2.0, 1), (38.0, 26.0, 8), (78.0, 26.0, 8), (78.0, 26.0, 0)]
    for version, (idle_s, busy_s, num_workers) in enumerate(times, start=5):
        now = _statistics(ledger_counts, rollout_idle_s=idle_s, rollout_busy_s=busy_s, num_workers=num_workers)
        reporter.train_step(groups, result, now, policy_version=version, times={"waiting": 0.0})
    reporter.close()
    file.close()
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if isinstance(r, TrainRecord)]
    assert [record.steps_since_start for record in records] == [1, 2, 3, 4]
    assert [record.rollout_idle_s for record in records] == [0.0, 8.0, 48.0, 48.0]
    _, *shares = (record.idle_share["rollout"] for record in records)
    assert shares[:2] == [0.25, 1.0]
    assert math.isnan(shares[2]), "no worker has reported any time"
    assert shares_of(records[:2]) == (0.0, 0.25)


def test_totals_stay_within_what_a_checkpoint_can_hold(tmp_path: Path, ledger_counts: LedgerCounts) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(
        file, Totals(generated_tokens=2**53 - 1, rollout_idle_s=1e12, rollout_busy_s=1e12, decoding_s=1e12)
    )
    reporter.start_clock()
    reporter.update_totals(
        _statistics(ledger_counts, rollout_idle_s=1e12, generated_tokens=2**53, rollout_busy_s=1e12, decoding_s=1e12)
    )
    reporter.close()
    file.close()
    assert from_msgpack(msgspec.msgpack.encode(reporter.totals), Totals) == reporter.totals


def test_skipped_steps_are_served_without_a_record(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord]
) -> None:
    """A train step whose optimizer steps are all skipped has no record, and the alarm must see it.

    The checkpoint of a drain may have skipped steps that the last record lacks: they are no steps of this process.
    """
    registry, file = CollectorRegistry(), MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals(skipped_steps=5), registry, [make_train_record(skipped_steps=2)])
    for expected in (2, 4):
        reporter.skipped(2)
        assert registry.get_sample_value("areal_rloo_skipped_steps_total") == expected
    reporter.metrics.train_step(make_train_record(skipped_steps=9))
    assert registry.get_sample_value("areal_rloo_skipped_steps_total") == 4, "counted from the start of the process"
    assert reporter.totals.skipped_steps == 9
    reporter.close()
    file.close()


@pytest.mark.parametrize("has_records", [True, False])
def test_a_scrape_reads_what_moves_between_two_steps(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord], ledger_counts: LedgerCounts, *, has_records: bool
) -> None:
    """Resumed at 100 tokens and 7 drops, the process counts from 0 on, whatever the last record says."""
    registry, file = CollectorRegistry(), MetricsFile(tmp_path / "metrics.jsonl")
    ledger = msgspec.structs.replace(ledger_counts, dropped={"stale": 7})
    last = make_train_record(generated_tokens=60, ledger=ledger_counts)
    totals = Totals(generated_tokens=100, learner_idle_s=40.0, failed_checkpoints=2, wall_s=500.0)
    reporter = _reporter(file, totals, registry, [last] if has_records else [])
    now = [_statistics(ledger)]
    reporter.follow(now[0], lambda: now[0])
    value = registry.get_sample_value
    for name in ("generated_tokens", "learner_idle_seconds", "failed_checkpoints", "wall_seconds"):
        assert value(f"areal_rloo_{name}_total") == 0, name
    more = msgspec.structs.replace(ledger, dropped={"stale": 9}, buffered=5)
    now[0] = _statistics(more, generated_tokens=30, epoch=1.5, num_workers=4)
    with reporter.waiting():
        assert (value("areal_rloo_learner_idle_seconds_total") or 0.0) > 0.0
    assert value("areal_rloo_generated_tokens_total") == 30
    assert value("areal_rloo_ledger_dropped_total", {"reason": "stale"}) == 2
    gauges = [value(f"areal_rloo_{name}") for name in ("ledger_buffered", "epoch", "num_workers")]
    assert gauges == [5, 1.5, 4]
    assert reporter.totals.generated_tokens == 100, "a scrape changes no total"
    reporter.metrics.train_step(make_train_record(loss=0.5, generated_tokens=140, num_train_steps=5, ledger=more))
    assert (value("areal_rloo_loss"), value("areal_rloo_generated_tokens_total")) == (0.5, 40)
    assert value("areal_rloo_num_train_steps_total") == 1
    reporter.close()
    file.close()


def test_a_resumed_run_knows_the_pace_of_its_steps(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord]
) -> None:
    """Its first step may take as long as those before: that is no standstill."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    records = [make_train_record(policy_version=n, wall_s=1920.0 * n) for n in range(1, 5)]
    reporter = _reporter(file, Totals(), records=records)
    assert reporter.pace().long_train_step_s == 1920.0
    reporter.close()
    file.close()


def test_the_clock_of_a_run_stands_until_the_learner_is_ready(tmp_path: Path, ledger_counts: LedgerCounts) -> None:
    """A counter never goes back: seconds before the start would stay on it."""
    registry, file = CollectorRegistry(), MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals(wall_s=500.0), registry)
    reporter.follow(_statistics(ledger_counts), lambda: _statistics(ledger_counts))
    name = "areal_rloo_wall_seconds_total"
    assert registry.get_sample_value(name) == 0
    reporter.start_clock()
    assert (registry.get_sample_value(name) or 0.0) > 0.0
    reporter.close()
    file.close()


def test_a_hung_loop_takes_no_number_of_the_last_step(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord], ledger_counts: LedgerCounts
) -> None:
    registry, file = CollectorRegistry(), MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals(), registry)

    def hung() -> IntakeStatistics:
        raise TimeoutError

    reporter.follow(_statistics(ledger_counts), hung)
    reporter.metrics.train_step(make_train_record(loss=0.5, generated_tokens=10))
    value = registry.get_sample_value
    assert (value("areal_rloo_loss"), value("areal_rloo_generated_tokens_total")) == (0.5, 10)
    reporter.close()
    file.close()


def test_a_disk_that_is_free_again_is_a_line_with_the_missing_records(
    eval_record: EvalRecord, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Disk(MetricsFile):
        is_full = False

        def append(self, record: TrainRecord | EvalRecord) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")
            super().append(record)

    file = Disk(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals())
    for version, is_full in enumerate((False, True, True, False, False)):
        file.is_full = is_full
        reporter.evaluation(msgspec.structs.replace(eval_record, policy_version=version))
        reporter._writer.submit(lambda: None).result()
    reporter.close()
    file.close()
    assert [record.policy_version for record in read_records(tmp_path / "metrics.jsonl")] == [0, 3, 4]
    assert caplog.text.count("a record is missing from metrics.jsonl: [Errno 28] No space left on device") == 2
    assert caplog.text.count("metrics.jsonl is written again; 2 records are missing") == 1
