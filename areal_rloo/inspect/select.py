"""Which trajectories, and in which order: conditions from text, and one pass over the records that keeps what is asked.

`selected` goes through all records once and holds no more of them than it gives back.
"""

from __future__ import annotations

import difflib
import heapq
import math
import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_rloo.errors import DataError
from areal_rloo.telemetry.trajectories import TrajectoryRecord

Condition = Callable[[TrajectoryRecord], bool]

PART = "reward."
_TEXT = "finish_reason"
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def _own_logprobs(record: TrajectoryRecord) -> list[float]:
    return [logprob for logprob, own in zip(record.logprobs, record.by_policy(), strict=True) if own]


def _lowest(record: TrajectoryRecord) -> float | None:
    return min(_own_logprobs(record), default=None)


def _mean(record: TrajectoryRecord) -> float | None:
    logprobs = _own_logprobs(record)
    return sum(logprobs) / len(logprobs) if logprobs else None


FIELDS: dict[str, Callable[[TrajectoryRecord], float | None]] = {
    "reward": lambda record: record.reward,
    "advantage": lambda record: record.advantage,
    "staleness": lambda record: record.staleness,
    "tokens": lambda record: record.num_tokens,
    "masked": lambda record: record.num_masked_tokens,
    "logprob_min": _lowest,
    "logprob_mean": _mean,
    "step": lambda record: record.policy_version,
}
"""Numbers of a trajectory by the names they have on the command line; parts of the reward are reward.NAME."""


def value_of(record: TrajectoryRecord, name: str) -> float | None:
    """A field's number; None where the trajectory has none, or what it has is NaN."""
    part = name.removeprefix(PART)
    value = FIELDS[name](record) if part == name else record.reward_parts.get(part)
    return None if value is None or math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Where:
    """FIELD OPERATOR VALUE. A trajectory without a value of the field does not meet it, whatever the operator."""

    name: str
    sign: str
    value: float | str

    def __call__(self, record: TrajectoryRecord) -> bool:
        found = record.finish_reason if self.name == _TEXT else value_of(record, self.name)
        return found is not None and _OPERATORS[self.sign](found, self.value)


@dataclass(frozen=True, slots=True)
class Order:
    """By a field, the lowest first unless `descending`; those without a value last, equal ones as in the file."""

    name: str
    descending: bool = False

    def __call__(self, record: TrajectoryRecord) -> tuple[bool, float]:
        value = value_of(record, self.name)
        if value is None:
            return True, 0.0
        return False, -value if self.descending else value


@dataclass(slots=True)
class Seen:
    """What a pass has met, to say what there is when nothing was found."""

    num_records: int = 0
    num_matching: int = 0
    parts: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    reasons: set[str] = field(default_factory=set)

    def note(self, record: TrajectoryRecord) -> None:
        self.num_records += 1
        self.parts.update(record.reward_parts)
        self.sources.add(record.source)
        if record.dropped is not None:
            self.reasons.add(record.dropped)


def matching(
    records: Iterable[TrajectoryRecord], conditions: Sequence[Condition], seen: Seen
) -> Iterator[TrajectoryRecord]:
    """Those that meet every condition, in their order; `seen` is up to date with each."""
    for record in records:
        seen.note(record)
        if all(condition(record) for condition in conditions):
            seen.num_matching += 1
            yield record


def selected(
    records: Iterable[TrajectoryRecord], *, order: Order | None, limit: int | None
) -> Iterable[TrajectoryRecord]:
    """The first `limit` in an order; without an order the newest, in that of the file.

    Without either it is the records' own iterator, not gone through yet.
    """
    if order is None:
        return records if limit is None else deque(records, maxlen=limit)
    return sorted(records, key=order) if limit is None else heapq.nsmallest(limit, records, key=order)


def parse_where(text: str) -> Where:
    """Read FIELD OPERATOR VALUE, such as `reward<0.5`.

    Raises:
        DataError: no such field, no operator, or a value of another type.
    """
    found = re.fullmatch(r"\s*([^<>=!\s]+)\s*(<=|>=|==|!=|=|<|>)\s*(.*?)\s*", text, re.DOTALL)
    if found is None:
        raise DataError(f"--where '{text}': expected FIELD OPERATOR VALUE, such as 'reward<0.5'")
    name, sign, value = found.groups()
    if name == _TEXT:
        if sign not in {"=", "==", "!="}:
            raise DataError(f"--where '{text}': {_TEXT} is text; expected = or !=, got {sign}")
        return Where(name, sign, value)
    _known("--where", text, name, (*FIELDS, _TEXT))
    try:
        compared = float(value)
    except ValueError:
        compared = math.nan
    if math.isnan(compared):
        raise DataError(f"--where '{text}': expected a number to compare {name} with, got '{value}'")
    return Where(name, sign, compared)


def parse_order(text: str) -> Order:
    """Read FIELD or -FIELD."""
    name = text.removeprefix("-")
    _known("--sort", text, name, tuple(FIELDS))
    return Order(name, descending=text.startswith("-"))


def parse_steps(text: str) -> Condition:
    """Read N or A:B, both ends included; an end that is left out is open."""
    low, colon, high = text.partition(":")
    try:
        first = int(low) if low else None
        last = (int(high) if high else None) if colon else first
        if not colon and first is None:
            raise ValueError
    except ValueError:
        raise DataError(f"--step '{text}': expected a policy version or a range of them, such as 12 or 10:20") from None
    if first is not None and last is not None and first > last:
        raise DataError(f"--step '{text}': expected the lower version first, such as {last}:{first}")
    return lambda record: (
        (first is None or record.policy_version >= first) and (last is None or record.policy_version <= last)
    )


def parse_sample(text: str) -> Condition:
    """Read GROUP/INDEX, or GROUP/INDEX.PART for one trajectory of a sample that gave several."""
    found = re.fullmatch(r"(-?\d+)/(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise DataError(f"--sample '{text}': expected GROUP/INDEX as in the trajectory's first line, such as 40/3")
    group_id, sample_index = int(found[1]), int(found[2])
    part_index = None if found[3] is None else int(found[3])
    return lambda record: (
        (record.group_id, record.sample_index) == (group_id, sample_index) and part_index in {None, record.part_index}
    )


def parse_pattern(text: str) -> re.Pattern[str]:
    """Read a regular expression to look for."""
    try:
        return re.compile(text)
    except re.error as error:
        raise DataError(
            f"--grep '{text}': expected a regular expression: {error}; put a backslash before ( [ * + ? . to mean it"
        ) from None


def contains(pattern: re.Pattern[str]) -> Condition:
    return lambda record: pattern.search(record.prompt) is not None or pattern.search(record.completion) is not None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What was expected, for the end of an error: the likeliest name, and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}expected {'one of ' if len(names) > 1 else ''}{', '.join(names) or 'none'}"


def _known(option: str, text: str, name: str, known: Sequence[str]) -> None:
    if not name.startswith(PART) and name not in known:
        raise DataError(f"{option} '{text}': no field '{name}'; {did_you_mean(name, (*known, 'reward.NAME'))}")
