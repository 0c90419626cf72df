"""The records of a run: rates and totals, also after a resume."""

import dataclasses
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
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.metrics import MetricsFile, read_records
from areal_rloo.telemetry.records import LedgerCounts, Record, TrainRecord


def _reporter(
    file: MetricsFile, totals: Totals, registry: CollectorRegistry | None = None, records: Sequence[Record] = ()
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
    )


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
    statistics = IntakeStatistics(
        ledger=ledger_counts,
        num_workers=1,
        num_behind=0,
        rollout_idle_s=0.0,
        generated_tokens=0,
        rollout_busy_s=0.0,
        decoding_s=0.0,
        repeated_results=0,
        filtered_prompts=0,
        epoch=0.5,
        truncated_prompts=0,
    )
    for version, num_generated in ((1, 150), (2, 400)):
        now = dataclasses.replace(statistics, generated_tokens=num_generated)
        reporter.train_step(groups, result, now, policy_version=version, times={"waiting": 0.0})
    reporter.close()
    file.close()
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if isinstance(r, TrainRecord)]
    assert [record.generated_tokens for record in records] == [before + 150, before + 400]
    # Both rates of a record are over the same seconds.
    ratios = [record.generated_tokens_per_s / record.trained_tokens_per_s for record in records]
    assert ratios == pytest.approx([150 / result.masks.num_tokens, 250 / result.masks.num_tokens])


def test_totals_stay_within_what_a_checkpoint_can_hold(tmp_path: Path, ledger_counts: LedgerCounts) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(
        file, Totals(generated_tokens=2**53 - 1, rollout_idle_s=1e12, rollout_busy_s=1e12, decoding_s=1e12)
    )
    reporter.start_clock()
    reporter.update_totals(
        IntakeStatistics(
            ledger=ledger_counts,
            num_workers=1,
            num_behind=0,
            rollout_idle_s=1e12,
            generated_tokens=2**53,
            rollout_busy_s=1e12,
            decoding_s=1e12,
            repeated_results=0,
            filtered_prompts=0,
            epoch=0.5,
            truncated_prompts=0,
        )
    )
    reporter.close()
    file.close()
    assert from_msgpack(msgspec.msgpack.encode(reporter.totals), Totals) == reporter.totals


def test_skipped_steps_are_served_without_a_record(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord]
) -> None:
    """A train step whose optimizer steps are all skipped has no record, and the alarm must see it."""
    registry, file = CollectorRegistry(), MetricsFile(tmp_path / "metrics.jsonl")
    reporter = _reporter(file, Totals(skipped_steps=5), registry, [make_train_record(skipped_steps=5)])
    for expected in (2, 4):
        reporter.skipped(2)
        assert registry.get_sample_value("areal_rloo_skipped_steps_total") == expected
    reporter.metrics.train_step(make_train_record(skipped_steps=9))
    assert registry.get_sample_value("areal_rloo_skipped_steps_total") == 4, "counted from the start of the process"
    assert reporter.totals.skipped_steps == 9
    reporter.close()
    file.close()
