"""Show a result as a Markdown page and as a plot of all ratios in SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path

from benchmarks.harness import Numbers, Ratio, Result

_ROW, _LEFT, _PLOT, _RIGHT = 22, 520, 380, 150  # pixels


def write(result: Result, folder: Path) -> None:
    """Write NAME.md and NAME.svg."""
    (folder / f"{result.benchmark}.md").write_text(markdown(result), encoding="utf-8")
    (folder / f"{result.benchmark}.svg").write_text(svg(result), encoding="utf-8")


def markdown(result: Result) -> str:
    """Return a page: question, machine, and two tables for each case."""
    machine = ", ".join(f"{name} {value}" for name, value in result.hardware.items())
    made = [f"commit {result.commit or 'unknown'}", f"{result.date or 'date unknown'}"]
    made += [] if result.seconds is None else [f"{result.seconds:g} s"]
    lines = [f"# {result.benchmark}", "", result.question, "", f"{machine}; {', '.join(made)}.", ""]
    if result.quick:
        lines += ["A quick run: no number here is a result.", ""]
    for numbers in result.cases:
        lines += [f"## {numbers.case}", "", *_tables(numbers)]
    return "\n".join([*lines, f"![Ratios]({result.benchmark}.svg)", ""])


def _tables(numbers: Numbers) -> Iterable[str]:
    facts = [f"{name} {value}" for name, value in numbers.facts.items()]
    rounds = "unknown" if numbers.rounds is None else str(numbers.rounds)
    rounds += f", of {numbers.turns} turns each" if numbers.turns > 1 else ""
    better = "larger" if numbers.larger_is_better else "smaller"
    yield f"Rounds: {rounds}. A {better} number is better. {', '.join(facts)}".rstrip()
    yield from ("", f"| contestant | median, {numbers.unit} | quartiles |", "|---|---|---|")
    for name, measured in numbers.measured.items():
        yield f"| {name} | {measured.median:g} | {_span(measured.quartiles)} |"
    yield from ("", "| ratio | median | interval of the median | coverage | spread |", "|---|---|---|---|---|")
    for ratio in numbers.ratios:
        shares = ["" if share is None else f"{share:.0%}" for share in (ratio.coverage, ratio.spread)]
        yield f"| {ratio.of} / {ratio.to} | {ratio.median:.3g} | {_span(ratio.interval)} | {' | '.join(shares)} |"
    yield ""


def svg(result: Result) -> str:
    """Return a plot: a row for each ratio with the interval of its median, on a logarithmic axis with a line at 1."""
    rows = [(numbers.case, ratio) for numbers in result.cases for ratio in numbers.ratios]
    ends = [1.0, *(end for _, ratio in rows for end in (ratio.median, *(ratio.interval or ())))]
    low, high = math.log(min(ends)) - 0.05, math.log(max(ends)) + 0.05

    def x(value: float) -> float:
        return round(_LEFT + _PLOT * (math.log(value) - low) / (high - low), 1)

    width, height = _LEFT + _PLOT + _RIGHT, _ROW * (len(rows) + 1) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold">{escape(result.question)}</text>',
        f'<path d="M{x(1)} 30V{height - 8}" stroke="gray" stroke-dasharray="4 3"/>',
    ]
    for number, (case, ratio) in enumerate(rows):
        parts += _row(_ROW * (number + 2), case, ratio, x(ratio.median), [x(end) for end in ratio.interval or ()])
    return "\n".join([*parts, "</svg>", ""])


def _row(y: int, case: str, ratio: Ratio, middle: float, ends: list[float]) -> Iterable[str]:
    yield f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(f"{case}: {ratio.of} / {ratio.to}")}</text>'
    if ends:
        yield f'<path d="M{ends[0]} {y}H{ends[1]}" stroke="steelblue" stroke-width="3"/>'
    yield f'<circle cx="{middle}" cy="{y}" r="4" fill="navy"/>'
    words = f"{ratio.median:.3g} {_span(ratio.interval)}".rstrip()
    yield f'<text x="{_LEFT + _PLOT + 10}" y="{y + 4}">{escape(words)}</text>'


def _span(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"
