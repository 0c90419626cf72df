"""Draw a run as tables: the state, the newest step, the samples, the processes, the health."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from areal_rloo.config import Config
from areal_rloo.inspect.shown import visible_line
from areal_rloo.telemetry.bound import bound_of
from areal_rloo.telemetry.health import Symptom
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord
from areal_rloo.telemetry.summary import exit_reason_of
from areal_rloo.top.fleet import Process

_SHOWN = (
    *("reward_mean", "entropy", "loss", "gradient_norm", "learning_rate", "staleness_mean", "masked_token_share"),
    *("zero_variance_group_share", "truncated_share", "completion_tokens_mean", "trained_tokens_per_s"),
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 40  # steps


def screen(
    folder: Path, config: Config, records: Sequence[Record], processes: Sequence[Process], symptoms: Sequence[Symptom]
) -> RenderableType:
    """Draw everything."""
    train = [record for record in records if isinstance(record, TrainRecord)]
    evaluations = {record.name: record for record in records if isinstance(record, EvalRecord)}
    parts: list[RenderableType] = [Text(_state(folder, config, train, evaluations))]
    parts += [Text(f"health: {symptom}", style="bold red") for symptom in symptoms]
    if train:
        parts += [Text(_ledger(train[-1])), _numbers(train)]
    parts.append(_processes(processes))
    return Group(*parts)


def _state(folder: Path, config: Config, train: Sequence[TrainRecord], evaluations: dict[str, EvalRecord]) -> str:
    done = train[-1].num_train_steps if train else 0
    words = [f"{folder.resolve().name}: step {done}/{config.learner.num_train_steps}"]
    words += [f"ended: {visible_line(reason)}"] if (reason := exit_reason_of(folder)) else []
    bound = bound_of(train)
    words += [] if bound is None else [f"{bound.name} ({bound.waits})"]
    words += [
        f"{visible_line(name)} {one.result[1]:.3f} at version {one.policy_version}" for name, one in evaluations.items()
    ]
    return "; ".join(words)


def _ledger(record: TrainRecord) -> str:
    counts = record.ledger
    dropped = ", ".join(f"{visible_line(reason)} {number:,}" for reason, number in counts.dropped.items()) or "none"
    return (
        f"samples: {counts.trained:,} trained on, {counts.buffered:,} in the buffer, {counts.in_flight:,} in flight; "
        f"dropped: {dropped}"
    )


def _numbers(train: Sequence[TrainRecord]) -> Table:
    table = Table(box=None, header_style="dim")
    for title in ("number", "now", f"last {_CURVE} steps"):
        table.add_column(title, justify="right" if title == "now" else "left")
    for field in _SHOWN:
        values = [getattr(record, field) for record in train[-_CURVE:]]
        table.add_row(field, number(values[-1]), curve(values))
    return table


def _processes(processes: Sequence[Process]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("process", "version", "decoding", "waiting", "scoring", "tokens/s", "idle", "memory", "cores"):
        table.add_column(title, justify="left" if title == "process" else "right", no_wrap=title == "process")
    for one in processes:
        if not one.now.numbers:
            table.add_row(one.name, "no answer", style="red")
            continue
        version = one.value("policy_version") if one.name == "learner" else one.value("engine_policy_version")
        idle = one.per_second("engine_idle_seconds_total")
        table.add_row(
            one.name,
            number(version),
            number(one.value("engine_num_running")),
            number(one.value("engine_num_waiting")),
            number(one.value("reward_waiting")),
            number(one.per_second("engine_generated_tokens_total")),
            "-" if idle is None else f"{100 * min(1.0, idle):.0f} %",
            f"{(one.value('process_resident_memory_bytes') or 0) / 2**30:.2f} GiB",
            number(one.per_second("process_cpu_seconds_total")),
        )
    return table


def number(value: float | None) -> str:
    """Write a number in few characters; - for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def curve(values: Sequence[float]) -> str:
    """Draw numbers as a line of blocks, between their lowest and highest; a space for a missing number."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    heights = [(value - low) / span * (len(_BLOCKS) - 1) if span > 0 else 0 for value in values]
    return "".join(_BLOCKS[round(height)] if math.isfinite(height) else " " for height in heights)
