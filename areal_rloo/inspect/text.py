"""One trajectory as a block of lines on the terminal: what is known of it, its prompt, its completion.

On a terminal lines are wrapped to its width; into a pipe each goes whole, so that grep and awk see what they look for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from areal_rloo.inspect.select import value_of
from areal_rloo.inspect.shown import kept_ends, number, shortened, signed, visible, visible_line
from areal_rloo.telemetry.trajectories import Token, TrajectoryRecord

_INDENT = "  "
_MOST_PROMPT = 1200  # characters shown of a prompt
_MOST_TOKENS = 240  # shown of a completion
_MOST_DETAIL = 800
_OTHERS = "italic cyan"


@dataclass(frozen=True, slots=True)
class View:
    """How much of each trajectory to show; `pattern` is highlighted."""

    tokens: bool = False
    full: bool = False
    pattern: re.Pattern[str] | None = None


def show(console: Console, record: TrajectoryRecord, view: View) -> None:
    """Print one block, and an empty line after it."""
    _print(console, _flowed(_facts(record), console))
    if record.dropped is not None and record.detail:
        _section(console, "detail", [Text(visible(_short(record.detail, _MOST_DETAIL, view)), style="red")])
    _section(console, "prompt", [_marked(Text(visible(_short(record.prompt, _MOST_PROMPT, view))), view)])
    if view.tokens:
        _section(console, f"completion, {record.num_tokens:,} tokens", _token_lines(record))
    else:
        _section(console, "completion", [_marked(_completion(record, view), view)])
    _print(console, [Text()])


def _facts(record: TrajectoryRecord) -> Iterator[Text]:
    """The words of the first line; none of them is broken."""
    yield Text(f"── {record.name}", style="bold")
    yield Text(f"step {record.policy_version}")
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
    """The completion with ⟨v7⟩ where the policy's version changes, and what others wrote in ⟦ ⟧."""
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
        yield _token_line(index, token)


def _token_line(index: int, token: Token) -> Text:
    line = Text(f"{index:>6}  {token.token_id:>7}  {f'v{token.version}':>7}  ")
    line.append(*((f"{token.logprob:>7.3f}", _surprise(token.logprob)) if token.by_policy else (f"{'-':>7}", "dim")))
    if token.advantage is not None:
        line.append(f"  {signed(token.advantage):>9}")
    shown = f"“{visible_line(token.text)}”"
    if token.by_policy:
        return line.append(f"  {shown}")
    return line.append(f"  ⟦{shown}⟧", style=_OTHERS).append("  not by the policy", style="dim")


def _surprise(logprob: float) -> str:
    """The less likely a token was, the louder."""
    if math.isnan(logprob) or logprob < -3:  # below 5 %
        return "red"
    return "yellow" if logprob < -1 else ""


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
        wraps = console.is_terminal
        lines = (
            text.wrap(console, max(20, console.width - len(_INDENT))) if wraps else text.split("\n", allow_blank=True)
        )
        _print(console, (Text(_INDENT).append_text(line) for line in lines))


def _flowed(words: Iterable[Text], console: Console) -> list[Text]:
    """Words two spaces apart, in as many lines as they need; the later lines are indented."""
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
