"""How a process serves its metrics, and the run folder's metrics.jsonl.

`areal_rloo.telemetry.tables` names and defines them. The learner feeds `LearnerMetrics` with the records it appends to
metrics.jsonl; what keeps its own statistics (engine, wire, weights) is read at each scrape through `watch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from areal_rloo.errors import DataError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, Record, TrainRecord
from areal_rloo.telemetry.tables import (
    BEHAVIOUR_KL,
    DROPPED,
    EVALUATION,
    LEDGER,
    LEDGER_STATES,
    PREFIX,
    REWARD_PART,
    ROLLOUT,
    ROLLOUT_DROPPED,
    SOURCE_REWARD,
    STEP_PART,
    TRAIN,
    TRAINED_TOKENS,
    UNBALANCED,
    Metric,
    Table,
)

logger = get_logger(__name__)


class LearnerMetrics:
    """The learner's metrics, fed with its records."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._train = _Values(TRAIN, registry)
        self._evaluation = {key: _gauge(metric, registry) for key, metric in EVALUATION.items()}
        self._parts = _gauge(REWARD_PART, registry)
        self._step_parts = _gauge(STEP_PART, registry)
        self._sources = _gauge(SOURCE_REWARD, registry)
        self._trained_tokens = _counter(TRAINED_TOKENS, registry)
        self._behaviour_kl = _gauge(BEHAVIOUR_KL, registry)
        self._ledger = _gauge(LEDGER, registry)
        self._dropped = _Totals(DROPPED, registry)
        self._unbalanced = _gauge(UNBALANCED, registry)

    def train_step(self, record: TrainRecord) -> None:
        self._train.update(msgspec.structs.asdict(record))
        for staleness, num_tokens in record.staleness_tokens.items():
            self._trained_tokens.labels(str(staleness)).inc(num_tokens)
        for staleness, divergence in record.behaviour_kl_by_staleness.items():
            self._behaviour_kl.labels(str(staleness)).set(divergence)
        for part, mean in record.reward_parts.items():
            self._parts.labels(part).set(mean)
        for part, seconds in record.times_s.items():
            self._step_parts.labels(part).set(seconds)
        for source, mean in record.reward_by_source.items():
            self._sources.labels(source).set(mean)
        self.ledger(record.ledger)

    def evaluation(self, record: EvalRecord) -> None:
        values = msgspec.structs.asdict(record)
        for key, gauge in self._evaluation.items():
            gauge.labels(record.name).set(values[key])

    def ledger(self, counts: LedgerCounts) -> None:
        values = msgspec.structs.asdict(counts)
        for state in LEDGER_STATES:
            self._ledger.labels(state).set(values[state])
        self._dropped.reach(counts.dropped)
        accounted = counts.trained + sum(counts.dropped.values()) + counts.buffered + counts.in_flight
        self._unbalanced.set(counts.admitted - accounted)


class RolloutMetrics:
    """A rollout worker's metrics, fed with running totals."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._values = _Values(ROLLOUT, registry)
        self._dropped = _Totals(ROLLOUT_DROPPED, registry)

    def update(self, values: Mapping[str, float], dropped: Mapping[str, int]) -> None:
        """Values by the keys of ROLLOUT; drops by reason; counts are since the start."""
        self._values.update(values)
        self._dropped.reach(dropped)


def watch(registry: CollectorRegistry, table: Table, read: Callable[[], Mapping[str, Any]]) -> None:
    """Serve a table from what `read` gives at each scrape, on the thread of the scrape; other keys are ignored."""
    registry.register(_Watch(table, read))


def relay(registry: CollectorRegistry, scrape: Callable[[], str]) -> None:
    """Serve another process's metrics beside our own: what `scrape` gives of its /metrics, at each scrape of ours.

    Metrics about the process itself stay behind, where they have the names that our own have. Text that cannot be read
    is a scrape without the other's metrics.
    """
    registry.register(_Relay(scrape))


def serve_metrics(
    registry: CollectorRegistry, port: int, *, address: str = "127.0.0.1"
) -> tuple[int, Callable[[], None]]:
    """Serve /metrics; gives the port (0 asks for a free one) and a function that ends it."""
    server, thread = start_http_server(port, addr=address, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_port), stop


class MetricsFile:
    """The run folder's metrics.jsonl: one line a record, each flushed, so that a killed writer loses at most one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def append(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RecordTail:
    """Reads a metrics.jsonl that is being written. JSON has no NaN and no infinity: both come back as NaN."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[Record]:
        """The records since the last call; a line that a killed writer has cut is left out.

        Raises:
            DataError: a line is whole, and no record of this version.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._position:  # a resumed run wrote the file again, up to its checkpoint
                self._position = 0
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return [record for line in whole.split(b"\n") if (record := self._decoded(line)) is not None]

    def _decoded(self, line: bytes) -> Record | None:
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            return None
        numbers = {key: math.nan if value is None else value for key, value in values.items()}
        try:
            return msgspec.convert(numbers, Record, str_keys=True)  # type: ignore[no-any-return]
        except msgspec.ValidationError as error:
            raise DataError(f"{self._path}: a record of another version of areal_rloo: {error}") from error


def read_records(path: Path) -> list[Record]:
    """All records of a metrics.jsonl that are whole."""
    return RecordTail(path).read()


class _Values:
    """The metrics of a table; a counter is told the total so far and never goes back."""

    def __init__(self, table: Table, registry: CollectorRegistry) -> None:
        self._gauges = {key: _gauge(metric, registry) for key, metric in table.items() if metric.kind == "gauge"}
        self._counters = {key: _counter(metric, registry) for key, metric in table.items() if metric.kind == "counter"}
        self._reached = dict.fromkeys(self._counters, 0.0)
        self._keeps = {key for key, metric in table.items() if metric.keeps}

    def update(self, values: Mapping[str, Any]) -> None:
        for key, gauge in self._gauges.items():
            if not (key in self._keeps and math.isnan(values[key])):
                gauge.set(values[key])
        for key, counter in self._counters.items():
            if values[key] > self._reached[key]:
                counter.inc(values[key] - self._reached[key])
                self._reached[key] = values[key]


class _Totals:
    """One counter with a label, told the totals so far by label; it never goes back."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._counter = _counter(metric, registry)
        self._reached: dict[str, int] = {}

    def reach(self, totals: Mapping[str, int]) -> None:
        for label, total in totals.items():
            reached = self._reached.get(label, 0)
            self._counter.labels(label).inc(max(0, total - reached))
            self._reached[label] = max(total, reached)


class _Watch(Collector):
    def __init__(self, table: Table, read: Callable[[], Mapping[str, Any]]) -> None:
        self._table = table
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        values = self._read()
        for key, metric in self._table.items():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            yield family(PREFIX + metric.name, metric.text, value=values[key])

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Names alone, so that registering reads nothing."""
        for metric in self._table.values():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            yield family(PREFIX + metric.name, metric.text)


class _Relay(Collector):
    def __init__(self, scrape: Callable[[], str]) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[PrometheusMetric]:
        try:
            families = list(text_string_to_metric_families(self._scrape()))
        except ValueError as error:
            logger.warning("metrics of another process cannot be read: %s", error)
            return
        yield from (family for family in families if not family.name.startswith(("python_", "process_")))

    def describe(self) -> Iterator[PrometheusMetric]:
        """No name is known before the first scrape."""
        return iter(())


def _gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(PREFIX + metric.name, metric.text, _labels(metric), registry=registry)


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(PREFIX + metric.name, metric.text, _labels(metric), registry=registry)


def _labels(metric: Metric) -> tuple[str, ...]:
    return () if metric.label is None else (metric.label,)
