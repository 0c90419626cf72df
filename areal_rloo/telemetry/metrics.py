"""Collect the metrics of a process for /metrics (scrapes.py), and write and read the run folder's metrics.jsonl.

In: records of the learner, and statistics of other objects, whose fields declare their metrics
(`areal_rloo.telemetry.metric`). The learner's records are pushed (`LearnerMetrics`); statistics are read at each scrape
(`watch`), on the scrape's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from areal_rloo.decoding import from_json
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.files import open_regular
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import (
    Declared,
    Measured,
    Metric,
    Samples,
    Values,
    declared_metrics,
    prometheus_name,
    read_samples,
)
from areal_rloo.telemetry.record_file import RecordFile
from areal_rloo.telemetry.records import EvalRecord, MovingNumbers, Record, TrainRecord

logger = get_logger(__name__)


class LearnerMetrics:
    """Serves the numbers of the learner's newest records."""

    def __init__(self, registry: CollectorRegistry, start: Mapping[str, int] | None = None) -> None:
        """`start`: counters of the train records, by field, at the start of this process, where they are not 0.

        All counters begin at 0, as Prometheus expects of a new process.
        """
        counts = ((prometheus_name(field, "counter"), float(count)) for field, count in (start or {}).items())
        self._train = _Served(TrainRecord, {name: {(): count} for name, count in counts})
        self._evaluation = _Served(EvalRecord)
        registry.register(self._train)
        registry.register(self._evaluation)

    def train_step(self, record: TrainRecord) -> None:
        self._train.take(record)

    def follow(self, start: MovingNumbers, read: Callable[[], MovingNumbers]) -> None:
        """Read the moving numbers at each scrape, too, on the scrape's thread. If `read` raises, the last ones stay.

        `start`: those at the start of this process.
        """
        self._train.follow(start, read)

    def skipped_steps(self, total: int) -> None:
        """Serve this total: a train step in which all optimizer steps are skipped has no record."""
        self._train.grow(prometheus_name("skipped_steps", "counter"), total)

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluation.take(record)


def watch(registry: CollectorRegistry, struct: type[Measured], read: Callable[[], Measured]) -> None:
    """Serve the metrics that a struct declares; each scrape calls `read` on a separate thread."""
    registry.register(_Safe(struct.__name__, _Served(struct, read=read)))


def relay(registry: CollectorRegistry, scrape: Callable[[], str]) -> None:
    """Serve another process's metrics beside our own; each scrape calls `scrape` for the text of the other's /metrics.

    Metrics about the other process itself are left out, because ours have the same names. If the text cannot be read,
    the other's metrics are missing from this scrape.
    """
    registry.register(_Safe("another process", _Relay(scrape)))


class MetricsFile:
    """Appends records to metrics.jsonl, each a line; a killed writer loses one record at most."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)

    def append(self, record: Record) -> None:
        """Append a record, or raise OSError and leave the file as it was."""
        self._file.append(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


class RecordTail:
    """Reads a metrics.jsonl while it is written. JSON has no NaN and no infinity: both come back as NaN.

    A resumed run removes the records after its checkpoint, and appends others. The tail then gives the others alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._last = b""  # line before the position
        self._given = array("q")  # a hash of each line before the position

    def read(self) -> list[Record]:
        """Give the records since the last call, without a line that a killed writer cut.

        Raises:
            DataError: the file cannot be read; or a line is whole, but is not a record of this version.
        """
        if not self._path.exists():
            return []
        given = self._given
        try:
            with open_regular(self._path) as file:
                file.seek(self._position - len(self._last))
                if file.read(len(self._last)) != self._last:  # another file, or another end
                    file.seek(0)
                    self._position, self._last, self._given = 0, b"", array("q")
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
        lines = [line + newline for line in whole.split(newline)] if newline else []
        num_kept = 0 if given is self._given else _num_kept(lines, given)
        self._position += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        self._given.extend(map(hash, lines))
        return [record for line in lines[num_kept:] if (record := self._decoded(line)) is not None]

    def _decoded(self, line: bytes) -> Record | None:
        try:
            values = from_json(line, dict[str, Any])
        except DecodeError:
            return None
        try:
            return msgspec.convert(_with_nan(values), Record, str_keys=True)  # type: ignore[no-any-return]
        except (msgspec.ValidationError, RecursionError) as error:
            raise DataError(f"{self._path}: a record of another version of areal_rloo: {error}") from error


def _with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Put NaN in the place of every null, in numbers by label, too."""
    return {
        key: math.nan if value is None else _with_nan(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _num_kept(lines: Sequence[bytes], given: Sequence[int]) -> int:
    """Count the lines at the beginning that were given before, in this order, perhaps with others between them."""
    rest = iter(given)
    return sum(1 for _ in itertools.takewhile(lambda line: hash(line) in rest, lines))


def read_records(path: Path) -> list[Record]:
    """Read all whole records of a metrics.jsonl."""
    return RecordTail(path).read()


class _Served(Collector):
    """Serves the newest values of a struct's metrics; a counter never goes back."""

    def __init__(
        self, struct: type[Measured], base: Samples | None = None, *, read: Callable[[], Measured | None] | None = None
    ) -> None:
        """`base`: what counters count from."""
        self._declared = declared_metrics(struct)
        self._read = read
        self._base = base or {}
        self._taking = threading.Lock()
        self._values: Samples = {declared.name: _first_values(declared) for declared in self._declared}

    def take(self, instance: Measured) -> None:
        """Serve these values from now on: all of the struct, or some. Other threads see all of them or none."""
        newest = read_samples(instance)
        with self._taking:
            taken = {
                declared.name: _merged(declared.metric, self._values[declared.name], self._counted(declared, newest))
                for declared in self._declared
                if declared.name in newest
            }
            self._values = {**self._values, **taken}

    def grow(self, name: str, total: float) -> None:
        """Serve a newer value of a counter without labels, before an instance has the value."""
        with self._taking:
            counted = max(self._values[name][()], total - self._base.get(name, {}).get((), 0.0))
            self._values = {**self._values, name: {(): counted}}

    def follow(self, start: Measured, read: Callable[[], Measured]) -> None:
        """Take some of the values at each scrape, too, as long as they can be read. Counters count from `start`."""

        def newest() -> Measured | None:
            with contextlib.suppress(Exception):  # a hung loop, say: other metrics of it are missing, with an error
                return read()
            return None

        self._base = {**self._base, **read_samples(start)}
        self._read = newest

    def _counted(self, declared: Declared, newest: Samples) -> Values:
        """Take the base of a counter from the newest values."""
        if declared.metric.kind != "counter" or declared.name not in self._base:
            return newest[declared.name]
        base = self._base[declared.name]
        return {labels: max(0.0, value - base.get(labels, 0.0)) for labels, value in newest[declared.name].items()}

    def collect(self) -> Iterator[PrometheusMetric]:
        if self._read is not None and (instance := self._read()) is not None:
            self.take(instance)
        values = self._values
        for declared, family in zip(self._declared, self.describe(), strict=True):
            for labels, value in values[declared.name].items():
                family.add_metric(labels, value)
            yield family

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Give the names alone; registering calls this method, and must read nothing."""
        for declared in self._declared:
            family = CounterMetricFamily if declared.is_counter else GaugeMetricFamily
            yield family(declared.name, declared.metric.help, labels=declared.labels)


def _first_values(declared: Declared) -> Values:
    if declared.metric.starts:
        return {(key,): 0.0 for key in declared.metric.starts}
    return {} if declared.labels or not declared.is_counter else {(): 0.0}  # a gauge of nothing yet is no 0


def _merged(metric: Metric, before: Values, newest: Values) -> Values:
    merged = {} if metric.fades else dict(before)
    for labels, value in newest.items():
        if metric.kind == "counter":
            merged[labels] = max(before.get(labels, value), value)
        elif metric.kind == "sum":
            merged[labels] = before.get(labels, 0.0) + value
        elif not (metric.keeps and math.isnan(value)):
            merged[labels] = value
    return merged


class _Relay(Collector):
    def __init__(self, scrape: Callable[[], str]) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[PrometheusMetric]:
        families = list(text_string_to_metric_families(self._scrape()))
        yield from (family for family in families if not family.name.startswith(("python_", "process_")))

    def describe(self) -> Iterator[PrometheusMetric]:
        """Give nothing: the names are unknown before the first scrape."""
        return iter(())


class _Safe(Collector):
    """Leaves out the metrics of a collector that raises, and logs the first error in a row.

    Without this class, the error would fail the whole scrape on a thread whose errors are in no log.
    """

    def __init__(self, name: str, collector: _Served | _Relay) -> None:
        self._name, self._collector = name, collector
        self._failed = False

    def collect(self) -> Iterator[PrometheusMetric]:
        try:
            families = list(self._collector.collect())
        except Exception:
            if not self._failed:
                logger.exception("metrics of %s cannot be read; they are left out", self._name)
            self._failed = True
            return
        self._failed = False
        yield from families

    def describe(self) -> Iterator[PrometheusMetric]:
        return self._collector.describe()
