"""Records as curves, and the style of the pages with charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_rloo.inspect.shown import NUM_COLORS
from areal_rloo.telemetry.metric import Declared, Measured, declared_metrics
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

_RULES = """
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(185px, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.facts span { font-size: .82rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 390px), 1fr)); gap: .8rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); stroke-width: .6; } .line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.unseen { fill: transparent; } circle:hover { fill: var(--ink); opacity: .5; }
.keys { font-size: .8rem; } .keys span { margin-right: .9rem; white-space: nowrap; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .35rem; }
section { overflow-x: auto; } .keys .note { white-space: normal; } .key.dashed { opacity: .45; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td { padding: .15rem 1.6rem .15rem 0; } td + td { text-align: right; padding-right: 0; }
.results td + td { padding-right: 1.6rem; white-space: nowrap; } .results td:first-child { white-space: nowrap; }
.below { display: grid; gap: .8rem; margin: .8rem 0; }
.ends td { padding-right: 1.2rem; vertical-align: top; } .ends .text { text-align: left; overflow-wrap: anywhere; }
"""
STYLE = _RULES + "\n".join(
    f".line.c{n} {{ stroke: var(--c{n}) }} .area.c{n}, .dot.c{n} {{ fill: var(--c{n}) }} "
    f".key.c{n} {{ background: var(--c{n}) }}"
    for n in range(NUM_COLORS)
)


def points(records: Sequence[TrainRecord | EvalRecord], field: str) -> list[tuple[int, Any]]:
    """Give a number by policy version."""
    return [(record.policy_version, getattr(record, field)) for record in records]


def drawn(struct: type[Measured]) -> list[Declared]:
    """List the metrics with a chart, in the order of the fields."""
    return [declared for declared in declared_metrics(struct) if declared.metric.chart is not None]


def curve_name(declared: Declared) -> str:
    """Name the curve of a metric."""
    return declared.metric.curve or declared.field.replace("_", " ")


def by_set(evaluations: Sequence[EvalRecord]) -> dict[str, list[EvalRecord]]:
    """Give the evaluations of each held-out set, in the order of versions."""
    sets: dict[str, list[EvalRecord]] = {record.name: [] for record in evaluations}
    for record in sorted(evaluations, key=lambda record: record.policy_version):
        sets[record.name].append(record)
    return sets
