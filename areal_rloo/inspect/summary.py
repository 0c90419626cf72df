"""Trajectories counted by step or by source: how many, how rewarded, how long, how many dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.table import Table

from areal_rloo.inspect.shown import number, visible_line
from areal_rloo.telemetry.trajectories import TrajectoryRecord

By = Literal["step", "source"]


@dataclass(slots=True)
class Tally:
    """Sums over the trajectories of one line of the table."""

    number: int = 0
    num_rewards: int = 0
    rewards: float = 0.0
    num_trained: int = 0
    num_without_advantage: int = 0  # trained with nothing to learn from
    num_generated: int = 0  # whose completion is known: a sample without a reward comes without it
    num_tokens: int = 0
    num_truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, record: TrajectoryRecord) -> None:
        self.number += 1
        self.num_generated += record.num_tokens > 0
        self.num_tokens += record.num_tokens
        self.num_truncated += record.finish_reason == "length"
        if record.reward is not None:
            self.num_rewards += 1
            self.rewards += record.reward
        if record.advantage is not None:
            self.num_trained += 1
            self.num_without_advantage += record.advantage == 0 and not any(record.advantages)
        if record.dropped is not None:
            self.dropped[record.dropped] += 1

    @property
    def reward_mean(self) -> float | None:
        return self.rewards / self.num_rewards if self.num_rewards else None


def tallied(records: Iterable[TrajectoryRecord], by: By) -> dict[int | str, Tally]:
    """A tally for each step or source, in order."""
    tallies: dict[int | str, Tally] = {}
    for record in records:
        key = record.policy_version if by == "step" else record.source
        tallies.setdefault(key, Tally()).add(record)
    return {key: tallies[key] for key in sorted(tallies)}


def table(tallies: dict[int | str, Tally], by: By) -> Table:
    """The tallies as a table; shares are of the line's trajectories, those of advantages of its trained ones."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column(by, justify="right" if by == "step" else "left")
    for name in ("number", "reward", "advantage 0", "tokens", "truncated"):
        shown.add_column(name, justify="right")
    shown.add_column("dropped")
    for key, tally in tallies.items():
        shown.add_row(
            visible_line(str(key)),
            f"{tally.number:,}",
            "-" if tally.reward_mean is None else number(tally.reward_mean),
            _share(tally.num_without_advantage, tally.num_trained),
            number(tally.num_tokens / tally.num_generated) if tally.num_generated else "-",
            _share(tally.num_truncated, tally.num_generated),
            _drops(tally),
        )
    return shown


def _drops(tally: Tally) -> str:
    if not tally.dropped:
        return "-"
    reasons = (f"{visible_line(name)} {_share(count, tally.number)}" for name, count in tally.dropped.most_common())
    return ", ".join(reasons)


def _share(count: int, whole: int) -> str:
    return f"{100 * count / whole:.0f} %" if whole else "-"
