"""Sections of the report from a run's trajectories.jsonl: completion lengths, and the ends of the reward.

The file may have hundreds of megabytes, so each line is read as an outline, and only the few shown are read whole.
"""

from __future__ import annotations

import contextlib
import html
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from areal_rloo.decoding import from_json
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.files import open_regular
from areal_rloo.inspect.shown import shortened, visible_line
from areal_rloo.report.charts import histogram
from areal_rloo.telemetry.trajectories import FILE_NAME, read_line

_LAST = 256  # trajectories, of which the best and the worst are shown
_SHOWN = 3
_MOST_CHARACTERS = 300
_MOST_TOKENS = 2**40


class _Outline(msgspec.Struct, frozen=True, gc=False):
    """The fields read of every line."""

    policy_version: int
    reward: float | None
    versions: list[tuple[int, int]]
    dropped: str | None


@dataclass(slots=True)
class Recorded:
    """The trained trajectories of a file."""

    lengths: list[tuple[int, int]] = field(default_factory=list)  # version, and tokens of the completion
    last: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=_LAST))  # reward and line


def read_recorded(folder: Path) -> Recorded:
    """Read the trajectories of a run; leave out lines of another version, and a missing file."""
    recorded = Recorded()
    with contextlib.suppress(OSError), open_regular(folder / FILE_NAME) as file:
        for line in file:
            with contextlib.suppress(DecodeError):
                outline = from_json(line, _Outline)
                num_tokens = sum(count for _, count in outline.versions)
                if outline.dropped is None and outline.reward is not None and 0 <= num_tokens < _MOST_TOKENS:
                    recorded.lengths.append((outline.policy_version, num_tokens))
                    recorded.last.append((outline.reward, line))
    return recorded


def length_chart(recorded: Recorded) -> str:
    """Draw the completion lengths of the first and of the last third of the steps."""
    versions = sorted({version for version, _ in recorded.lengths})
    if not versions:
        return ""
    third = -(-len(versions) // 3)
    parts = {"last third of the steps": versions[-third:], "first third": versions[:third]}
    if len(versions) < 3:
        parts = {"all steps": versions}
    counts = {
        name: Counter(num_tokens for version, num_tokens in recorded.lengths if chosen[0] <= version <= chosen[-1])
        for name, chosen in parts.items()
    }
    return histogram("Completion lengths of recorded trajectories, in tokens", counts)


def best_and_worst(recorded: Recorded) -> str:
    """Show the trajectories with the highest and the lowest reward among the last."""
    newest = list(reversed(recorded.last))  # of equal rewards, the newest come first
    lowest, highest = sorted(newest, key=lambda pair: pair[0]), sorted(newest, key=lambda pair: -pair[0])
    if len(newest) < 2 * _SHOWN or lowest[0][0] == highest[0][0]:
        return ""
    rows = [*_rows("highest", highest[:_SHOWN]), *_rows("lowest", lowest[:_SHOWN])]
    title = f"Highest and lowest rewards of the last {len(newest)} recorded trajectories"
    head = "<tr class=soft><td><td>reward<td>version<td>sample<td class=text>prompt and completion"
    return f"<section><h2>{title}</h2><table class=ends>{head}{''.join(rows)}</table></section>" if rows else ""


def _rows(name: str, chosen: Sequence[tuple[float, bytes]]) -> list[str]:
    rows = []
    for _, line in chosen:
        with contextlib.suppress(DataError):  # of another version
            record = read_line(line)
            prompt, completion = (
                html.escape(visible_line(shortened(text, _MOST_CHARACTERS)))
                for text in (record.prompt, record.completion)
            )
            rows.append(
                f"<tr><td>{name}<td>{record.reward:.4g}<td>{record.policy_version}<td>{record.name}"
                f"<td class=text><span class=soft>{prompt}</span> {completion}"
            )
    return rows
