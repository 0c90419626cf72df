"""Trajectories as text for the terminal: a block of lines for each (`show`), or a table of counts (`table`).

On a terminal, lines wrap at the width. Into a pipe, lines stay whole for grep and awk.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_rloo.inspect.select import value_of
from areal_rloo.inspect.shown import kept_ends, number, shortened, signed, visible, visible_line
from areal_rloo.telemetry.trajectories import TrajectoryRecord

_INDENT = "  "
_MOST_PROMPT, _MOST_EXPECTED = 1200, 300  # characters shown of a prompt, and of an expected answer
_MOST_TOKENS = 240  # shown of a completion
_MOST_DETAIL = 800
_OTHERS = "italic cyan"

By = Literal["step", "source"]


@dataclass(frozen=True, slots=True)
class View:
    """Which parts of a trajectory to show; `pattern` is highlighted."""

    tokens: bool = False
    full: bool = False
    pattern: re.Pattern[str] | None = None


def show(console: Console, record: TrajectoryRecord, view: View) -> None:
    """Print a trajectory, and an empty line after the block."""
    _print(console, _flowed(_facts(record), console))
    if record.dropped is not None and record.detail:
        _section(console, "detail", [Text(visible(_short(record.detail, _MOST_DETAIL, view)), style="red")])
    _section(console, "prompt", [_marked(Text(visible(_short(record.prompt, _MOST_PROMPT, view))), view)])
    if view.tokens:
        _section(console, f"completion, {record.num_tokens:,} tokens", _token_lines(record))
    else:
        _section(console, "completion", [_marked(_completion(record, view), view)])
    if record.expected:
        _section(console, "expected answer", [Text(visible(_short(record.expected, _MOST_EXPECTED, view)))])
    _print(console, [Text()])


def _facts(record: TrajectoryRecord) -> Iterator[Text]:
    """Yield the words of the first line; a word is never wrapped."""
    yield Text(f"── {record.name}", style="bold")
    yield Text(f"version {record.policy_version}")
    if record.dropped is not None:
        yield Text(f"dropped: {visible_line(record.dropped)}", style="bold red")
    yield Text(visible_line(record.source)).append(f"[{record.item_index}]", style="dim")
    if record.epoch:
        yield Text(f"epoch {record.epoch}")
    yield _reward(record)
    if record.advantage is not None:
        yield Text(f"advantage {signed(record.advantage)}")
    elif record.dropped is None:
        yield Text("not trained", style="yellow")
    if record.staleness is not None:
        yield Text(f"staleness {record.staleness}", style="yellow" if record.staleness else "")
    if record.num_masked_tokens:
        yield Text(f"masked {record.num_masked_tokens:,}", style="yellow")
    yield Text(f"tokens {record.num_tokens:,}")
    lowest, mean = value_of(record, "logprob_min"), value_of(record, "logprob_mean")
    if lowest is not None and mean is not None:
        yield Text(f"logprob {number(mean)} (min {number(lowest)})")
    yield Text(visible_line(record.finish_reason), style="yellow" if record.finish_reason != "stop" else "")
    if record.versions:
        first, last = record.versions[0][0], record.versions[-1][0]
        yield Text(f"v{first}" if first == last else f"v{first}→v{last}", style="dim")


def _reward(record: TrajectoryRecord) -> Text:
    if record.reward is None:
        return Text("no reward", style="yellow")
    reward = Text(f"reward {number(record.reward)}", style="bold")
    if record.reward_parts:
        parts = ", ".join(f"{visible_line(name)} {number(value)}" for name, value in record.reward_parts.items())
        reward.append(f" ({parts})", style="not bold")
    return reward


def _completion(record: TrajectoryRecord, view: View) -> Text:
    """Format the completion, with ⟨v7⟩ at each change of version, and text of tools and users in ⟦ ⟧."""
    several = len({version for version, _ in record.versions}) > 1
    most = record.num_tokens if view.full else _MOST_TOKENS
    head, tail = kept_ends(record.num_tokens, most)
    text = Text()
    version: int | None = None
    by_policy = True
    for index, token in enumerate(record.tokens()):
        if head <= index < record.num_tokens - tail:
            if index == head:
                text.append(f" … {record.num_tokens - most:,} tokens … ", style="dim")
            continue
        if token.by_policy != by_policy:
            by_policy = token.by_policy
            text.append("⟧" if by_policy else "⟦", style="bold cyan")
        if several and by_policy and token.version != version:
            version = token.version
            text.append(f"⟨v{version}⟩", style="bold magenta")
        text.append(visible(token.text), style="" if by_policy else _OTHERS)
    if not by_policy:
        text.append("⟧", style="bold cyan")
    return text


def _token_lines(record: TrajectoryRecord) -> Iterator[Text]:
    advantage = "  advantage" if record.advantages else ""
    yield Text(f"{'#':>6}  {'id':>7}  version  logprob{advantage}  token", style="dim")
    for index, token in enumerate(record.tokens()):
        line = Text(f"{index:>6}  {token.token_id:>7}  {f'v{token.version}':>7}  ")
        surprise = "red" if not token.logprob >= -3 else "yellow" if token.logprob < -1 else ""  # -3: 5 %; NaN is red
        line.append(*((f"{token.logprob:>7.3f}", surprise) if token.by_policy else (f"{'-':>7}", "dim")))
        if token.advantage is not None:
            line.append(f"  {signed(token.advantage):>9}")
        shown = f"“{visible_line(token.text)}”"
        if token.by_policy:
            yield line.append(f"  {shown}")
        else:
            yield line.append(f"  ⟦{shown}⟧", style=_OTHERS).append("  not by the policy", style="dim")


def _short(text: str, most: int, view: View) -> str:
    return text if view.full else shortened(text, most)


def _marked(text: Text, view: View) -> Text:
    if not text.plain:
        return Text("(empty)", style="dim")
    if view.pattern is not None:
        text.highlight_regex(view.pattern, style="reverse")
    return text


def _section(console: Console, title: str, texts: Iterable[Text]) -> None:
    _print(console, [Text(title, style="dim")])
    for text in texts:
        if text.plain.endswith("\n"):
            text.right_crop(1)
        lines = text.split("\n", allow_blank=True)
        if console.is_terminal:
            lines = text.wrap(console, max(20, console.width - len(_INDENT)))
        _print(console, (Text(_INDENT).append_text(line) for line in lines))


def _flowed(words: Iterable[Text], console: Console) -> list[Text]:
    """Join words with two spaces, and wrap at the width of the terminal; indent all lines after the first."""
    lines = [Text()]
    for word in words:
        if lines[-1].plain.strip():
            if console.is_terminal and lines[-1].cell_len + 2 + word.cell_len > console.width:
                lines.append(Text(_INDENT))
            else:
                lines[-1].append("  ")
        lines[-1].append_text(word)
    return lines


def _print(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


@dataclass(slots=True)
class Tally:
    """Sums over the trajectories of a line of the table."""

    number: int = 0
    num_rewards: int = 0
    rewards: float = 0.0
    num_trained: int = 0
    num_without_advantage: int = 0  # trained, with advantage 0
    num_generated: int = 0  # with a known completion; samples without a reward have none
    num_tokens: int = 0
    num_truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, record: TrajectoryRecord) -> None:
        self.number += 1
        self.num_generated += record.num_tokens > 0
        self.num_tokens += record.num_tokens
        self.num_truncated += record.finish_reason == "length"
        self.num_rewards += record.reward is not None
        self.rewards += record.reward or 0.0
        if record.advantage is not None:
            self.num_trained += 1
            self.num_without_advantage += record.advantage == 0 and not any(record.advantages)
        if record.dropped is not None:
            self.dropped[record.dropped] += 1

    @property
    def reward_mean(self) -> float | None:
        return self.rewards / self.num_rewards if self.num_rewards else None


def tallied(records: Iterable[TrajectoryRecord], by: By) -> dict[int | str, Tally]:
    """Make a tally for each step or source, in order."""
    tallies: defaultdict[int | str, Tally] = defaultdict(Tally)
    for record in records:
        tallies[record.policy_version if by == "step" else record.source].add(record)
    return {key: tallies[key] for key in sorted(tallies)}


def table(tallies: dict[int | str, Tally], by: By) -> Table:
    """Format tallies as a table. Shares refer to the trajectories of a line; `advantage 0` to the trained ones."""
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
            ", ".join(f"{visible_line(name)} {_share(n, tally.number)}" for name, n in tally.dropped.most_common())
            or "-",
        )
    return shown


def _share(count: int, whole: int) -> str:
    return f"{100 * count / whole:.0f} %" if whole else "-"
