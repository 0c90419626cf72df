"""Draw charts as SVG text: names and numbers in, a section of the page out. Colors are CSS variables of the page.

A curve has at most 200 points, so the page of a long run stays small: a longer curve becomes means of equal
parts, with a band from the lowest to the highest. From 40 points on, a smoothed line lies over the points. The axis is
logarithmic if a few large values would press all others to the ground.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from areal_rloo.inspect.shown import NUM_COLORS, number

_WIDTH, _HEIGHT = 420, 220
_MOST = 1e100
_MOST_POINTS, _SMOOTHED_FROM = 200, 40
_SMOOTHING = 20  # the smoothed line averages over about this part of the points
_SQUASHED, _MOST_RANGE = 50.0, 1e8  # times the median, and at most times the least: then the axis is logarithmic
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 12, 26
_STRIP = 22  # height of a row of a strip
_MOST_BARS, _MOST_LABELS = 16, 8
_MOST_DIGITS = 1e5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line; `band` has the low and the high edge of an area around the line, point by point."""

    name: str
    points: Sequence[Point]
    band: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plane between the axes, with round numbers at the grid lines."""

    x_low: float
    x_high: float
    y_ticks: Sequence[float]
    x_ticks: Sequence[float]
    logarithmic: bool = False  # then all heights are above 0

    def across(self, x: float) -> float:
        return round(_LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT), 1)

    def down(self, y: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        if self.logarithmic:
            low, high, y = math.log10(low), math.log10(high), math.log10(y)
        return round(_HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> list[str]:
        parts = []
        for y in self.y_ticks:
            down = self.down(y)
            parts.append(f"<line x1={_LEFT} x2={_WIDTH - _RIGHT} y1={down} y2={down} class=grid />")
            parts.append(f"<text x={_LEFT - 6} y={down + 4} text-anchor=end>{_short(y)}</text>")
        bottom = f"y={_HEIGHT - 8} text-anchor=middle"
        return parts + [f"<text x={self.across(x)} {bottom}>{number(x)}</text>" for x in self.x_ticks]


def _short(value: float) -> str:
    """Format a number for the room beside an axis."""
    return number(value) if abs(value) < _MOST_DIGITS else f"{value:.3g}".replace("e+0", "e").replace("e+", "e")


def line_chart(title: str, curves: Sequence[Curve], *, hint: str = "", dots: bool = False, share: bool = False) -> str:
    """Draw lines over a common axis, each point with the value as a tooltip; `share` fixes the axis to 0 .. 1."""
    curves = [_shorter(_without_missing(curve)) for curve in curves]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return _section(title, hint, [], [])
    heights = [y for _, y in points] + [edge for curve in curves for pair in curve.band for edge in pair]
    frame = _frame([x for x, _ in points], [0.0, 1.0] if share else heights)
    if frame.logarithmic:
        hint = f"{hint}; log axis" if hint else "log axis"
    parts = frame.grid()
    for index, curve in enumerate(curves):
        if curve.band:
            xs = [x for x, _ in curve.points]
            lows, highs = zip(*curve.band, strict=True)
            parts.append(_area(frame, xs, lows, highs, index, 0.18))
        smooth = not dots and len(curve.points) >= _SMOOTHED_FROM
        parts.append(_line(frame, curve.points, index, opacity=0.35 if smooth else 1.0))
        if smooth:
            parts.append(_line(frame, smoothed(curve.points), index))
        parts += _marks(frame, curve, index, visible=dots or len(curve.points) == 1)
    return _section(title, hint, parts, curves)


def stacked_chart(title: str, curves: Sequence[Curve]) -> str:
    """Draw shares that add up to 1 as areas on top of each other; all curves have the same x values."""
    if not curves or not curves[0].points:
        return _section(title, "", [], [])
    curves = [dataclasses.replace(_shorter(curve), band=()) for curve in curves]
    xs = [x for x, _ in curves[0].points]
    frame = _frame(xs, [0.0, 1.0])
    parts = frame.grid()
    floor = [0.0] * len(xs)
    for index, curve in enumerate(curves):
        ceiling = [low + y for low, (_, y) in zip(floor, curve.points, strict=True)]
        parts.append(_area(frame, xs, floor, ceiling, index, 0.75))
        middle = [(x, (low + high) / 2) for x, low, high in zip(xs, floor, ceiling, strict=True)]
        parts += _marks(frame, Curve(curve.name, middle), index, visible=False, values=[y for _, y in curve.points])
        floor = ceiling
    return _section(title, "", parts, curves)


@dataclass(frozen=True, slots=True)
class Row:
    """Events of a kind: from, to, and a description."""

    name: str
    events: Sequence[tuple[float, float, str]]
    bad: bool = False


def strip_chart(title: str, rows: Sequence[Row], low: float, high: float) -> str:
    """Draw events along a common axis, a row for each kind: a dot for a moment, a bar for a time."""
    if not rows:
        return ""
    height, left, high = _STRIP * len(rows) + _BOTTOM, 120, max(high, low + 1)

    def across(x: float) -> float:
        return round(left + (min(max(x, low), high) - low) / (high - low) * (_WIDTH - left - _RIGHT), 1)

    parts = [
        f"<text x={across(x)} y={height - 8} text-anchor=middle>{number(x)}</text>"
        for x in ticks(low, high, 5, whole=True)
        if low <= x <= high
    ]
    for index, row in enumerate(rows):
        middle, color = _STRIP * index + _STRIP // 2, "c4" if row.bad else "c0"
        parts.append(f"<line x1={left} x2={_WIDTH - _RIGHT} y1={middle} y2={middle} class=grid />")
        parts.append(f"<text x={left - 8} y={middle + 4} text-anchor=end>{html.escape(row.name)}</text>")
        for first, last, text in _fewer(row.events):
            span = number(first) if first == last else f"{number(first)} to {number(last)}"
            left_end, width = round(across(first) - 3, 1), round(across(last) - across(first) + 6, 1)
            parts.append(
                f"<rect x={left_end} y={middle - 5} width={width} height=10 rx=4 class='dot {color}'>"
                f"<title>{html.escape(text)}: {span}</title></rect>"
            )
    return _section(title, "", parts, [], height)


def _fewer(events: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Join neighbours, so that at most `_MOST_POINTS` are left."""
    together = max(1, -(-len(events) // _MOST_POINTS))
    joined = []
    for at in range(0, len(events), together):
        firsts, lasts, texts = zip(*events[at : at + together], strict=True)
        joined.append((min(firsts), max(lasts), texts[0] if together == 1 else f"{len(texts)} times: {texts[-1]}"))
    return joined


def histogram(title: str, counts: Mapping[str, Mapping[int, int]]) -> str:
    """Draw how often each whole number of at least 0 comes, as shares, in at most 16 equal ranges."""
    highest = max((value for row in counts.values() for value in row), default=-1)
    if highest < 0:
        return ""
    width = -(-(highest + 1) // _MOST_BARS)
    starts = range(0, highest + 1, width)
    shares = {}
    for name, row in counts.items():
        heights = [0] * len(starts)
        for value, count in row.items():
            heights[value // width] += count
        shares[name] = [height / max(1, sum(heights)) for height in heights]
    labels = [number(start) if width == 1 else f"{number(start)} to {number(start + width - 1)}" for start in starts]
    return bar_chart(title, labels, shares)


def bar_chart(title: str, labels: Sequence[str], shares: Mapping[str, Sequence[float]]) -> str:
    """Draw shares as bars, side by side for each label; labels without room are left out, tooltips have them."""
    most = max(share for row in shares.values() for share in row)
    frame = _Frame(0, len(labels), ticks(0.0, most, 5), ())
    parts, room = frame.grid(), 0.8 / len(shares)
    for index, (name, row) in enumerate(shares.items()):
        for place, share in enumerate(row):
            left, right = frame.across(place + 0.1 + index * room), frame.across(place + 0.1 + (index + 1) * room)
            top, bottom = frame.down(share), frame.down(0.0)
            box = f"x={left} y={top} width={round(right - left, 1)} height={round(bottom - top, 1)}"
            tooltip = f"<title>{html.escape(f'{name}, {labels[place]}')}: {100 * share:.3g} %</title>"
            parts.append(f"<rect {box} class='area c{index % NUM_COLORS}'>{tooltip}</rect>")
    every = -(-len(labels) // _MOST_LABELS)
    for place in range(0, len(labels), every):
        at = f"x={frame.across(place + 0.5)} y={_HEIGHT - 8} text-anchor=middle"
        parts.append(f"<text {at}>{html.escape(labels[place].partition(' ')[0])}</text>")
    return _section(title, "share", parts, [Curve(name, ()) for name in shares])


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the exponential moving average of the heights, corrected for the missing past at the beginning."""
    keep = math.exp(-_SMOOTHING / len(points))
    total = weight = 0.0
    line = []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1.0
        line.append((x, total / weight))
    return line


def _shorter(curve: Curve) -> Curve:
    """Replace the points of a long curve by means of equal parts, with a band from the lowest to the highest."""
    if len(curve.points) <= _MOST_POINTS:
        return curve
    points, band = [], []
    for part in range(_MOST_POINTS):
        here = slice(part * len(curve.points) // _MOST_POINTS, (part + 1) * len(curve.points) // _MOST_POINTS)
        xs, ys = zip(*curve.points[here], strict=True)
        edges = curve.band[here] or [(min(ys), max(ys))]
        points.append((xs[len(xs) // 2], fmean(ys)))
        band.append((min(low for low, _ in edges), max(high for _, high in edges)))
    return Curve(curve.name, points, band)


def _line(frame: _Frame, points: Sequence[Point], index: int, *, opacity: float = 1.0) -> str:
    line = " ".join(f"{frame.across(x)},{frame.down(y)}" for x, y in points)
    dashes = "" if index < NUM_COLORS else " stroke-dasharray='5 3'"  # the colors come again
    return f"<polyline points='{line}' class='line c{index % NUM_COLORS}' opacity={opacity}{dashes} />"


def _marks(
    frame: _Frame, curve: Curve, index: int, *, visible: bool, values: Sequence[float] | None = None
) -> list[str]:
    """Draw a circle with a tooltip at each point; a wide, invisible circle unless `visible`."""
    look = f"r=3 class='dot c{index % NUM_COLORS}'" if visible else "r=6 class=unseen"
    shown = [y for _, y in curve.points] if values is None else values
    return [
        f"<circle cx={frame.across(x)} cy={frame.down(y)} {look}>"
        f"<title>{html.escape(curve.name)} at {number(x)}: {value:.4g}</title></circle>"
        for (x, y), value in zip(curve.points, shown, strict=True)
    ]


def _area(
    frame: _Frame, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], index: int, opacity: float
) -> str:
    corners = [*zip(xs, highs, strict=True), *reversed([*zip(xs, lows, strict=True)])]
    edge = " ".join(f"{frame.across(x)},{frame.down(y)}" for x, y in corners)
    return f"<polygon points='{edge}' class='area c{index % NUM_COLORS}' opacity={opacity} />"


def _section(title: str, hint: str, parts: Sequence[str], curves: Sequence[Curve], height: int = _HEIGHT) -> str:
    title = html.escape(title, quote=True)
    body = "<p class=soft>nothing measured</p>"
    if parts:
        body = f"<svg viewBox='0 0 {_WIDTH} {height}' role=img aria-label='{title}'>{''.join(parts)}</svg>"
    names = enumerate(html.escape(curve.name) for curve in curves)
    keys = "".join(f"<span><i class='key {_look(index)}'></i>{name}</span>" for index, name in names)
    note = f"<span class='soft note'>{html.escape(hint)}</span>" if hint else ""
    return f"<section><h2>{title}</h2>{body}<p class=keys>{keys}{note}</p></section>"


def _look(index: int) -> str:
    return f"c{index % NUM_COLORS}" + (" dashed" if index >= NUM_COLORS else "")


def _without_missing(curve: Curve) -> Curve:
    """Leave out the points with NaN, an infinity, or a number too large for the arithmetic of the axes."""
    numbers = zip(curve.points, curve.band, strict=True) if curve.band else zip(curve.points)
    keep = [index for index, pairs in enumerate(numbers) if all(abs(y) <= _MOST for pair in pairs for y in pair)]
    band = [curve.band[index] for index in keep] if curve.band else ()
    return Curve(curve.name, [curve.points[index] for index in keep], band)


def _frame(xs: Sequence[float], ys: Sequence[float]) -> _Frame:
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    inside = [x for x in ticks(x_low, x_high, 6, whole=True) if x_low <= x <= x_high]
    if max(ys) / _MOST_RANGE < min(ys) and max(ys) > _SQUASHED * median(ys):
        powers = range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9) + 1)
        return _Frame(x_low, x_high, [10.0**power for power in powers], inside, logarithmic=True)
    return _Frame(x_low, x_high, ticks(min(ys), max(ys), 5), inside)


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Give about `most` round numbers, from at or below `low` to at or above `high`."""
    scale = max(abs(low), abs(high))
    if scale < 1e-100:  # nothing but zeros
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * scale:
        low, high = low - 0.1 * scale, high + 0.1 * scale
    if 0 < low < 0.4 * high:
        low = 0.0  # an axis that nearly reaches zero should
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 6 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(first, last + 1)]
