"""Declare a metric at the field that holds the number.

    entropy: Annotated[float, Metric("Mean entropy of the policy", unit="nats")]

A struct with such fields (`Measured`) is a record of metrics.jsonl or the statistics of an object. One rule makes the
name at /metrics from the field (`prometheus_name`). The report and docs/metrics.md read the declarations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, Protocol, get_args, get_type_hints

import msgspec

PREFIX = "areal_rloo_"

Values = dict[tuple[str, ...], float]  # by the values of the labels
Samples = Mapping[str, Values]  # by name at /metrics


class Measured(Protocol):
    """A msgspec struct with declared metrics; `metrics_prefix` precedes the fields' names at /metrics."""

    metrics_prefix: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report; metrics with the same chart are curves in one plane."""

    title: str
    whole: bool = False  # the axis always goes from 0 to 1


@dataclass(frozen=True, slots=True)
class Metric:
    """Declares the number in a field, or the numbers in a field with a dict."""

    help: str  # the definition, without a full stop
    unit: str = ""  # such as `tokens`, `s`, `nats`, `share`; empty for a plain number
    # A counter is a total that only grows. A sum belongs to a single step in the file, and is added up at /metrics.
    kind: Literal["gauge", "counter", "sum"] = "gauge"
    label: str | None = None  # name of the label with the dict's keys
    starts: tuple[str, ...] = ()  # keys of a counter from the start: no growth shows in a series from 1 on
    healthy: tuple[float, float] | None = None  # lowest and highest healthy value; for a counter, of the growth
    # Some steps cannot measure this number; NaN leaves the last value at /metrics, or an alert on an average is silent.
    keeps: bool = False
    fades: bool = False  # a label that the newest numbers lack has no value; else the last one
    chart: Chart | None = None
    curve: str = ""  # name of the curve; empty for the field's name


@dataclass(frozen=True, slots=True)
class Label:
    """Declares a text field whose value labels every metric of the struct."""

    name: str


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric of a struct."""

    path: tuple[str, ...]  # the attributes that lead from the struct to the number
    name: str  # at /metrics
    metric: Metric
    labels: tuple[str, ...]

    @property
    def field(self) -> str:
        """The name in the struct and in metrics.jsonl; a field of a struct inside has the outer field before a dot."""
        return ".".join(self.path)

    @property
    def is_counter(self) -> bool:
        return self.metric.kind != "gauge"


def prometheus_name(field: str, kind: str) -> str:
    """Give the name at /metrics: prefix, field, `_s` spelled out as Prometheus wants, `_total` for totals."""
    spelled = re.sub(r"_per_s$", "_per_second", re.sub(r"(?<!_per)_s$", "_seconds", field))
    return PREFIX + spelled + ("" if kind == "gauge" else "_total")


def healthy_range(declared: Declared) -> str:
    """Give the healthy range as text; empty without a range."""
    if declared.metric.healthy is None:
        return ""
    low, high = declared.metric.healthy
    text = f"{low:g}" if low == high else f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
    return f"grows by {text}" if declared.is_counter else text


def declared_metrics(struct: type[Measured]) -> list[Declared]:
    """Give the metrics of a struct, and of the structs in its fields, in order."""
    return list(_declared(struct, struct.metrics_prefix, (), tuple(_labels(struct).values())))


def read_samples(instance: Measured) -> Samples:
    """Read the metrics of an instance."""
    outer = tuple(str(getattr(instance, field)) for field in _labels(type(instance)))
    samples = {}
    for declared in declared_metrics(type(instance)):
        value = attrgetter(declared.field)(instance)
        by_key = {outer: value} if declared.metric.label is None else {(*outer, str(k)): v for k, v in value.items()}
        samples[declared.name] = by_key
    return samples


def _declared(struct: type, prefix: str, path: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[Declared]:
    for name, hint in _hints(struct).items():
        for metric in (meta for meta in get_args(hint) if isinstance(meta, Metric)):
            own = () if metric.label is None else (metric.label,)
            yield Declared((*path, name), prometheus_name(prefix + name, metric.kind), metric, (*labels, *own))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _declared(hint, f"{prefix}{name}_", (*path, name), labels)


def _hints(struct: type) -> dict[str, Any]:
    """Give the types of a struct's fields, then those of its properties."""
    properties = {name: value.fget for name, value in vars(struct).items() if isinstance(value, property)}
    returned = {name: get_type_hints(get, include_extras=True)["return"] for name, get in properties.items()}
    return get_type_hints(struct, include_extras=True) | returned


def _labels(struct: type) -> dict[str, str]:
    """Give the label that each text field declares, by field."""
    return {
        field: meta.name for field, hint in _hints(struct).items() for meta in get_args(hint) if isinstance(meta, Label)
    }
