"""`python -m areal_rloo.report RUN_FOLDER`: a run as one self-contained page, report.html.

In: config.yaml, metrics.jsonl and, once the run has ended, summary.json. Out: HTML with curves drawn as SVG; no script,
nothing loaded from anywhere. Works on a run in progress.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_rloo.errors import DataError, UserError
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

_COLORS = ("#3b6fd4", "#d4653b", "#3f9d5a", "#9a5bc4")
_WIDTH, _HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fbfbfa; --line: #8885; --soft: #6b7480; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #15191e; --soft: #98a2ad; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1340px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: .95rem; margin: 0 0 .2rem; font-weight: 600; }
p { margin: .1rem 0; } .soft { color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1.2rem 0; }
.facts div { min-width: 7rem; } .facts b { display: block; font-size: 1.35rem; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 1.4rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: .5; } table { border-collapse: collapse; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; } td:last-child { text-align: right; }
.key { font-size: .85rem; } .key span { margin-right: 1rem; } pre { overflow-x: auto; font-size: .85rem; }
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line of (x, y) points."""

    name: str
    points: Sequence[tuple[float, float]]


def write_report(folder: Path) -> Path:
    """Write report.html into a run folder and give its path.

    Raises:
        DataError: the folder holds no run.
    """
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: no run here (there is no config.yaml); expected a run folder such as runs/latest")
    records = read_records(folder / "metrics.jsonl")
    train = [record for record in records if isinstance(record, TrainRecord)]
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    summary_path = folder / "summary.json"
    summary = json.loads(summary_path.read_text()) if summary_path.is_file() else None
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    page = "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width,initial-scale=1'>",
            f"<title>{html.escape(folder.name)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{html.escape(folder.name)}</h1>",
            f"<p class=soft>{_state(summary)}</p>",
            _facts(train, evaluations, summary),
            "<div class=charts>",
            *_charts(train, evaluations),
            "</div>",
            _ledger(train, summary),
            f"<details><summary>Resolved config</summary><pre>{html.escape(config)}</pre></details>",
            "</body></html>",
        ]
    )
    target = folder / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def _state(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "The run has not ended yet."
    return f"The run ended: {html.escape(str(summary['exit_reason']))}."


def _facts(train: list[TrainRecord], evaluations: list[EvalRecord], summary: dict[str, Any] | None) -> str:
    facts: list[tuple[str, str]] = []
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        facts.append(("held-out accuracy", f"{first.accuracy:.3f} → {last.accuracy:.3f}"))
    if train:
        last_step = train[-1]
        facts += [
            ("train steps", str(last_step.num_train_steps)),
            ("reward", f"{train[0].reward_mean:.2f} → {last_step.reward_mean:.2f}"),
            ("wall clock", f"{last_step.wall_s:.0f} s"),
            ("rollout idle", f"{100 * last_step.rollout_idle_s / last_step.wall_s:.1f} %"),
            ("learner idle", f"{100 * last_step.learner_idle_s / last_step.wall_s:.1f} %"),
        ]
    if summary is not None:
        staleness = summary["staleness"]
        facts.append(("staleness, mean and max", f"{staleness['mean_trained']:.2f}, {staleness['max_trained']}"))
        facts.append(("tokens trained", f"{summary['tokens']['trained']:,}"))
    cells = "".join(f"<div><b>{html.escape(value)}</b><span class=soft>{name}</span></div>" for name, value in facts)
    return f"<div class=facts>{cells}</div>"


def _charts(train: list[TrainRecord], evaluations: list[EvalRecord]) -> list[str]:
    def of(name: str, key: str) -> Curve:
        return Curve(name, [(r.policy_version, float(getattr(r, key))) for r in train])

    accuracy = Curve("accuracy", [(r.policy_version, r.accuracy) for r in evaluations])
    stale = [
        Curve(f"staleness {value}", [(r.policy_version, _share(r.staleness_tokens, value)) for r in train])
        for value in sorted({value for r in train for value in r.staleness_tokens})[:4]
    ]
    return [
        chart("Held-out accuracy, greedy, by policy version", [accuracy], dots=True),
        chart("Reward of the batch", [of("mean", "reward_mean"), of("std", "reward_std")]),
        chart("Staleness of trained tokens, in versions", [of("mean", "staleness_mean"), of("max", "staleness_max")]),
        chart("Share of trained tokens by staleness", stale),
        chart("Tokens past the bound, out of the loss (share)", [of("masked", "masked_token_share")]),
        chart(
            "Completion length, in tokens", [of("mean", "completion_tokens_mean"), of("max", "completion_tokens_max")]
        ),
        chart(
            "Tokens per second",
            [of("generated", "generated_tokens_per_s"), of("trained", "trained_tokens_per_s")],
        ),
        chart("Ratio: current / proximal", [of("mean", "ratio_mean"), of("max", "ratio_max")]),
        chart("Share of tokens with a clipped ratio", [of("clipped", "ratio_clipped_share")]),
        chart(
            "behaviour_weight: proximal / behaviour",
            [of("mean", "behaviour_weight_mean"), of("max", "behaviour_weight_max")],
        ),
        chart("Entropy", [of("entropy", "entropy")]),
        chart("Gradient norm, before clipping", [of("norm", "gradient_norm")]),
        chart("Seconds of a step", [of("training", "train_step_s"), of("waiting for the batch", "wait_s")]),
        chart(
            "Groups without variance; truncated completions (shares)",
            [of("zero variance", "zero_variance_group_share"), of("truncated", "truncated_share")],
        ),
    ]


def _share(tokens: dict[int, int], value: int) -> float:
    return tokens.get(value, 0) / max(1, sum(tokens.values()))


def chart(title: str, curves: Sequence[Curve], *, dots: bool = False) -> str:
    """One chart: axes from the data, a line a curve, the value at each point as its tooltip."""
    points = [point for curve in curves for point in curve.points]
    heading = f"<h2>{html.escape(title)}</h2>"
    if not points:
        return f"<section>{heading}<p class=soft>nothing measured yet</p></section>"
    x_low, x_high = _padded([x for x, _ in points], 0.0)
    y_low, y_high = _padded([y for _, y in points], 0.05)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{html.escape(title, quote=True)}'>"]
    for step in range(5):
        value = y_low + (y_high - y_low) * step / 4
        _, down = place(x_low, value)
        parts.append(f"<line class=grid x1={_LEFT} x2={_WIDTH - _RIGHT} y1={down} y2={down} />")
        parts.append(f"<text x={_LEFT - 6} y={down + 4} text-anchor=end>{_number(value)}</text>")
        across, _ = place(x_low + (x_high - x_low) * step / 4, y_low)
        label = _number(x_low + (x_high - x_low) * step / 4)
        parts.append(f"<text x={across} y={_HEIGHT - 8} text-anchor=middle>{label}</text>")
    for color, curve in zip(_COLORS, curves, strict=False):
        placed = [place(x, y) for x, y in curve.points]
        line = " ".join(f"{across},{down}" for across, down in placed)
        parts.append(f"<polyline points='{line}' fill=none stroke='{color}' stroke-width=1.8 />")
        radius, opacity = (3, 1) if dots else (5, 0)
        for (across, down), (x, y) in zip(placed, curve.points, strict=True):
            parts.append(
                f"<circle cx={across} cy={down} r={radius} fill='{color}' opacity={opacity}>"
                f"<title>{html.escape(curve.name)} at {_number(x)}: {y:.4g}</title></circle>"
            )
    parts.append("</svg>")
    key = "".join(
        f"<span style='color:{color}'>● {html.escape(curve.name)}</span>"
        for color, curve in zip(_COLORS, curves, strict=False)
    )
    return f"<section>{heading}{''.join(parts)}<p class=key>{key}</p></section>"


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5, high + 0.5
    margin = (high - low) * share
    return (low if low == 0 else low - margin), high + margin


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _ledger(train: list[TrainRecord], summary: dict[str, Any] | None) -> str:
    if summary is not None:
        counts = summary["ledger"]
    elif train:
        ledger = train[-1].ledger
        counts = {name: getattr(ledger, name) for name in ("admitted", "trained", "dropped", "buffered", "in_flight")}
    else:
        return ""
    rows = [(name, counts[name]) for name in ("admitted", "trained", "buffered", "in_flight")]
    rows += [(f"dropped: {reason}", number) for reason, number in counts["dropped"].items()]
    cells = "".join(f"<tr><td>{html.escape(name)}<td>{number:,}" for name, number in rows)
    return f"<h2>Ledger, in samples</h2><table>{cells}</table>"


def main() -> int:
    """Write the report of the folder on the command line."""
    if len(sys.argv) != 2:
        print("usage: python -m areal_rloo.report RUN_FOLDER", file=sys.stderr)  # noqa: T201 - the face of the program
        return 2
    try:
        print(write_report(Path(sys.argv[1])))  # noqa: T201
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
