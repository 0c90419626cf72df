"""Metrics: declared at their fields, served at /metrics, and written to a file that survives a crash of the writer."""

import math
import re
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from support.metric_names import metric_names

from areal_rloo.errors import DataError
from areal_rloo.report.metrics_page import SERVED
from areal_rloo.rewards.request import RewardStatistics
from areal_rloo.rollout.protocol import ProtocolStatistics
from areal_rloo.telemetry.metric import PREFIX, Measured, Metric
from areal_rloo.telemetry.metrics import (
    LearnerMetrics,
    MetricsFile,
    RecordTail,
    read_records,
    relay,
    watch,
)
from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, TrainRecord
from areal_rloo.telemetry.scrapes import serve_metrics
from areal_rloo.wire.counts import ChannelStatistics

MakeTrainRecord = Callable[..., TrainRecord]


class WorkStatistics(msgspec.Struct, frozen=True):
    """Statistics to watch."""

    metrics_prefix: ClassVar[str] = ""

    num: Annotated[int, Metric("A number")]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def served_names(registry: CollectorRegistry) -> set[str]:
    lines = generate_latest(registry).decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def _statistics(struct: type[Measured], number: float) -> Measured:
    """Return an instance with this number in every field."""
    values = {}
    for field in msgspec.structs.fields(struct):
        labelled = "dict" in str(field.type)
        values[field.name] = {"reward_failed": number} if labelled else number
    return struct(**values)


def test_metrics_serves_exactly_the_declared_names(make_train_record: MakeTrainRecord, eval_record: EvalRecord) -> None:
    registry = CollectorRegistry()
    learner = LearnerMetrics(registry)
    learner.train_step(make_train_record())
    learner.evaluation(eval_record)
    for _, struct in SERVED[2:]:
        watch(registry, struct, lambda struct=struct: _statistics(struct, 2.0))
    assert served_names(registry) == metric_names()


def test_a_train_step_is_shown(make_train_record: MakeTrainRecord) -> None:
    registry = CollectorRegistry()
    LearnerMetrics(registry).train_step(make_train_record(reward_mean=0.75, num_train_steps=7))
    assert value(registry, "reward_mean") == 0.75
    assert value(registry, "num_train_steps_total") == 7
    assert value(registry, "staleness_tokens_total", staleness="1") == 25
    assert value(registry, "ledger_in_flight") == 16
    assert value(registry, "ledger_dropped_total", reason="stale") == 3
    assert value(registry, "ledger_imbalance") == 0


def test_numbers_of_single_steps_are_added_up_and_old_labels_stay(make_train_record: MakeTrainRecord) -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    metrics.train_step(make_train_record(staleness_tokens={0: 50, 1: 25}, reward_by_source={"math": 0.5}))
    metrics.train_step(make_train_record(staleness_tokens={1: 5}, reward_by_source={"code": 1.0}))
    assert value(registry, "trained_tokens_total") == 200
    assert value(registry, "staleness_tokens_total", staleness="0") == 50
    assert value(registry, "staleness_tokens_total", staleness="1") == 30
    assert value(registry, "reward_by_source", source="math") == 0.5


def test_totals_are_zero_before_the_first_step() -> None:
    """An alert on missing steps needs a series from the beginning."""
    registry = CollectorRegistry()
    LearnerMetrics(registry)
    assert value(registry, "num_train_steps_total") == 0


def test_an_unbalanced_ledger_is_shown(make_train_record: MakeTrainRecord, ledger_counts: LedgerCounts) -> None:
    registry = CollectorRegistry()
    ledger = msgspec.structs.replace(ledger_counts, in_flight=14)
    LearnerMetrics(registry).train_step(make_train_record(ledger=ledger))
    assert value(registry, "ledger_imbalance") == 2


def test_an_evaluation_is_shown(eval_record: EvalRecord) -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    metrics.evaluation(eval_record)
    metrics.evaluation(msgspec.structs.replace(eval_record, name="math", accuracy=0.25, num_samples=8, pass_share=0.5))
    assert value(registry, "evaluation_accuracy", set="arithmetic") == 0.625
    assert value(registry, "evaluation_accuracy", set="math") == 0.25
    assert value(registry, "evaluation_pass_share", set="math") == 0.5
    assert value(registry, "evaluation_policy_version", set="arithmetic") == 4


def test_parts_of_the_reward_and_rewards_by_source_are_shown(make_train_record: MakeTrainRecord) -> None:
    registry = CollectorRegistry()
    record = make_train_record(reward_parts={"right": 0.5, "short": -0.1}, reward_by_source={"math": 0.25})
    LearnerMetrics(registry).train_step(record)
    assert value(registry, "reward_parts", part="short") == -0.1
    assert value(registry, "reward_by_source", source="math") == 0.25


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_a_counter_never_decreases_and_reaches_the_highest_total(totals: list[int]) -> None:
    registry = CollectorRegistry()
    now = 0
    watch(registry, RewardStatistics, lambda: _statistics(RewardStatistics, now))
    watch(registry, ProtocolStatistics, lambda: _statistics(ProtocolStatistics, now))
    highest = 0
    for total in totals:
        now = total
        highest = max(highest, total)
        assert value(registry, "reward_scored_total") == highest
        assert value(registry, "reward_dropped_total", reason="reward_failed") == highest
        assert value(registry, "wire_unacknowledged") == total, "a gauge goes back"


def test_watched_statistics_are_read_at_each_scrape() -> None:
    registry = CollectorRegistry()
    statistics = ChannelStatistics(messages_in=1, messages_out=0, bytes_in=0, bytes_out=0, refused=0, unroutable=0)
    watch(registry, ChannelStatistics, lambda: statistics)
    assert value(registry, "wire_messages_in_total") == 1
    statistics = msgspec.structs.replace(statistics, messages_in=5)
    assert value(registry, "wire_messages_in_total") == 5


def test_watch_reads_nothing_before_the_first_scrape() -> None:
    reads = []

    def read() -> WorkStatistics:
        reads.append(1)
        return WorkStatistics(num=7)

    registry = CollectorRegistry()
    watch(registry, WorkStatistics, read)
    assert reads == []
    list(registry.collect())
    assert reads == [1]


OTHERS = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 3.0
# HELP sglang:wait_seconds Waiting.
# TYPE sglang:wait_seconds histogram
sglang:wait_seconds_bucket{le="1.0"} 2.0
sglang:wait_seconds_bucket{le="+Inf"} 4.0
sglang:wait_seconds_count 4.0
sglang:wait_seconds_sum 7.5
# TYPE python_info gauge
python_info{version="3"} 1.0
"""


def test_relayed_metrics_are_served_without_those_of_the_process() -> None:
    registry = CollectorRegistry()
    Gauge("areal_rloo_own", "Ours.", registry=registry).set(1)
    relay(registry, lambda: OTHERS)
    served = generate_latest(registry).decode()
    assert "areal_rloo_own 1.0" in served
    for line in OTHERS.splitlines():
        assert (line in served) == ("python_info" not in line)


@pytest.mark.parametrize("text", ["", "no metrics at all {", "<html>502</html>"])
def test_with_unreadable_relayed_metrics_our_own_are_still_served(text: str) -> None:
    registry = CollectorRegistry()
    Gauge("areal_rloo_own", "Ours.", registry=registry).set(1)
    relay(registry, lambda: text)
    assert "areal_rloo_own 1.0" in generate_latest(registry).decode()


@pytest.mark.parametrize("relayed", [True, False])
def test_metrics_that_cannot_be_read_are_logged_once_and_left_out(
    relayed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry, fails = CollectorRegistry(), True
    Gauge("areal_rloo_own", "Ours.", registry=registry).set(1)

    def read() -> WorkStatistics:
        if fails:
            raise KeyError("mine")
        return WorkStatistics(num=7)

    if relayed:
        relay(registry, lambda: f"# TYPE {PREFIX}num gauge\n{PREFIX}num {read().num}\n")
    else:
        watch(registry, WorkStatistics, read)
    for _ in range(3):
        served = generate_latest(registry).decode()
        assert "areal_rloo_own 1.0" in served
        assert f"{PREFIX}num" not in served
    (message,) = caplog.messages
    assert "they are left out" in message
    fails = False
    assert f"{PREFIX}num 7.0" in generate_latest(registry).decode()


def test_metrics_are_served_on_a_free_port_until_stopped(make_train_record: MakeTrainRecord) -> None:
    registry = CollectorRegistry()
    LearnerMetrics(registry).train_step(make_train_record())
    port, stop = serve_metrics(registry, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert "areal_rloo_ledger_trained_total 32.0" in text
    stop()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)


def test_records_are_read_back(tmp_path: Path, make_train_record: MakeTrainRecord, eval_record: EvalRecord) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    records = [make_train_record(num_train_steps=1), eval_record, make_train_record(num_train_steps=2)]
    for record in records:
        file.append(record)
        assert read_records(path)[-1] == record, "a record is in the file as soon as it is appended"
    file.close()
    assert read_records(path) == records


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_does_not_stop_the_reader(
    tmp_path: Path, make_train_record: MakeTrainRecord, value: float
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append(make_train_record(ratio_max=value))
    file.append(make_train_record(num_train_steps=2))
    file.close()
    first, second = read_records(path)
    assert isinstance(first, TrainRecord)
    assert math.isnan(first.ratio_max)
    assert second == make_train_record(num_train_steps=2)


def test_a_line_that_is_no_text_is_left_out(tmp_path: Path, make_train_record: MakeTrainRecord) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append(make_train_record())
    file.close()
    path.write_bytes(b'{"name": "\xff"}\n' + b"[" * 100_000 + b"\n" + path.read_bytes())
    assert len(read_records(path)) == 1


def test_a_folder_in_place_of_the_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_records(tmp_path)


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "metrics.jsonl") == []


@given(st.data())
def test_a_killed_writer_loses_at_most_its_last_record(data: st.DataObject) -> None:
    records = [
        EvalRecord(
            name="arithmetic",
            policy_version=n,
            policy_version_max=n,
            num_prompts=1,
            num_samples=1,
            num_failed=0,
            **dict.fromkeys(("accuracy", "accuracy_error", "reward"), 0.5),
            **dict.fromkeys(("reward_error", "pass_share", "majority_share"), 0.5),
            completion_tokens_mean=1.0,
            wall_s=float(n),
        )
        for n in range(3)
    ]
    lines = [msgspec.json.encode(record) + b"\n" for record in records]
    content = b"".join(lines)
    left = content[: data.draw(st.integers(0, len(content)), label="bytes written")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(left)
        whole = records[: left.count(b"\n")]
        assert read_records(path) == whole
        file = MetricsFile(path)  # the next writer carries on
        file.append(records[2])
        file.append(records[2])
        file.close()
        assert read_records(path) == [*whole, records[2], records[2]]


def test_a_tail_gives_each_record_once(tmp_path: Path, make_train_record: MakeTrainRecord) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RecordTail(path)
    assert tail.read() == []
    file = MetricsFile(path)
    file.append(make_train_record(num_train_steps=1))
    file.append(make_train_record(num_train_steps=2))
    assert [record.num_train_steps for record in tail.read()] == [1, 2]
    assert tail.read() == []
    line = msgspec.json.encode(make_train_record(num_train_steps=3)) + b"\n"
    with path.open("ab") as half:
        half.write(line[:50])
        half.flush()
        assert tail.read() == [], "half a line is not read"
        half.write(line[50:])
    assert [record.num_train_steps for record in tail.read()] == [3]
    file.close()


def test_a_tail_repeats_no_record_that_a_resumed_run_kept(tmp_path: Path, make_train_record: MakeTrainRecord) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [msgspec.json.encode(make_train_record(num_train_steps=n)) + b"\n" for n in range(1, 5)]
    path.write_bytes(b"".join(lines))
    tail = RecordTail(path)
    tail.read()
    path.write_bytes(lines[0])
    assert tail.read() == []
    path.write_bytes(lines[0] + lines[1])
    assert [record.num_train_steps for record in tail.read()] == [2]


def test_a_tail_gives_what_a_resumed_run_wrote_before_the_next_look(
    tmp_path: Path, make_train_record: MakeTrainRecord
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [msgspec.json.encode(make_train_record(num_train_steps=n, wall_s=n / 7)) + b"\n" for n in range(1, 12)]
    path.write_bytes(b"".join(lines[:6]))
    tail = RecordTail(path)
    tail.read()
    for kept, written in ((lines[:2], lines[6:8]), ([*lines[:1], lines[7]], lines[8:]), ([], lines[3:5])):
        path.write_bytes(b"".join((*kept, *written)))
        assert len(tail.read()) == len(written), "what is kept was given before; what is new was not"
        assert tail.read() == []
    path.write_bytes(b"")
    assert tail.read() == []
    path.write_bytes(lines[0])
    assert len(tail.read()) == 1


def test_a_record_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"train","loss":1.0}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl: a record of another version"):
        read_records(path)


def test_a_null_among_numbers_by_label_is_nan(tmp_path: Path, make_train_record: MakeTrainRecord) -> None:
    """JSON has no infinity: a mean that overflows is written as null."""
    path = tmp_path / "metrics.jsonl"
    record = make_train_record(num_train_steps=1, reward_parts={"score": math.inf, "length": 1.0})
    path.write_bytes(msgspec.json.encode(record) + b"\n")
    (read,) = read_records(path)
    assert isinstance(read, TrainRecord)
    assert math.isnan(read.reward_parts["score"]) and read.reward_parts["length"] == 1.0


def test_mismatch_keeps_its_last_value_and_a_nan_loss_is_shown(make_train_record: MakeTrainRecord) -> None:
    """Alerts average over minutes, and one NaN would silence them. A mismatch of 0 would be a measurement."""
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    metrics.train_step(make_train_record(mismatch_abs_mean=math.nan))
    assert registry.get_sample_value(f"{PREFIX}mismatch_abs_mean") is None
    metrics.train_step(make_train_record(mismatch_abs_mean=0.25, loss=1.0))
    metrics.train_step(make_train_record(mismatch_abs_mean=math.nan, loss=math.nan))
    assert registry.get_sample_value(f"{PREFIX}mismatch_abs_mean") == 0.25
    loss = registry.get_sample_value(f"{PREFIX}loss")
    assert loss is not None
    assert math.isnan(loss)


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 900])
def test_deeply_nested_numbers_are_refused_or_left_out(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"train","a":' + b'{"a":' * depth + b"null" + b"}" * depth + b"}\n")
    try:
        assert read_records(path) == []
    except DataError as error:
        assert "of another version" in str(error)
