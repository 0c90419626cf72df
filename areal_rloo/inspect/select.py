"""Select and order trajectories: parse conditions from text, and apply them in a single pass over the records.

`selected` keeps no more records in memory than it returns. A mistake in a text is a DataError with the expected form.
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
from areal_rloo.trajectory import SampleId

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


def _mean(record: TrajectoryRecord) -> float | None:
    logprobs = _own_logprobs(record)
    return sum(logprobs) / len(logprobs) if logprobs else None


FIELDS: dict[str, Callable[[TrajectoryRecord], float | None]] = {
    "reward": lambda record: record.reward,
    "advantage": lambda record: record.advantage,
    "staleness": lambda record: record.staleness,
    "tokens": lambda record: record.num_tokens,
    "masked": lambda record: record.num_masked_tokens,
    "logprob_min": lambda record: min(_own_logprobs(record), default=None),
    "logprob_mean": _mean,
    "step": lambda record: record.policy_version,
}
"""Numbers of a trajectory, by name on the command line. Parts of the reward are called reward.NAME."""


def part_of(name: str) -> str | None:
    """Return NAME of reward.NAME; None for another field."""
    return name.removeprefix(PART) if name.startswith(PART) else None


def value_of(record: TrajectoryRecord, name: str) -> float | None:
    """Return the value of a field; None if the trajectory has no value, or NaN."""
    part = part_of(name)
    value = FIELDS[name](record) if part is None else record.reward_parts.get(part)
    return None if value is None or math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Where:
    """The condition FIELD OPERATOR VALUE. A trajectory without a value meets no condition, for any operator."""

    name: str
    sign: str
    value: float | str

    def __call__(self, record: TrajectoryRecord) -> bool:
        found = record.finish_reason if self.name == _TEXT else value_of(record, self.name)
        return found is not None and _OPERATORS[self.sign](found, self.value)


@dataclass(frozen=True, slots=True)
class Order:
    """Sort by a field, lowest first unless `descending`; missing values last, equal values in file order."""

    name: str
    descending: bool = False

    def __call__(self, record: TrajectoryRecord) -> tuple[bool, float]:
        value = value_of(record, self.name)
        if value is None:
            return True, 0.0
        return False, -value if self.descending else value


@dataclass(slots=True)
class Seen:
    """Counts and names collected during a pass, for messages."""

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
    """Yield the records that meet every condition, in file order; update `seen` with each record."""
    for record in records:
        seen.note(record)
        if all(condition(record) for condition in conditions):
            seen.num_matching += 1
            yield record


def selected(
    records: Iterable[TrajectoryRecord], *, order: Order | None, limit: int | None
) -> Iterable[TrajectoryRecord]:
    """Return the first `limit` records in an order; without an order, the newest in file order.

    Without order and limit, return the unread iterator.
    """
    if order is None:
        return records if limit is None else deque(records, maxlen=limit)
    return sorted(records, key=order) if limit is None else heapq.nsmallest(limit, records, key=order)


def parse_where(text: str) -> Where:
    """Parse FIELD OPERATOR VALUE, such as `reward<0.5`."""
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
    """Parse FIELD or -FIELD."""
    name = text.removeprefix("-")
    _known("--sort", text, name, tuple(FIELDS))
    return Order(name, descending=text.startswith("-"))


def parse_steps(text: str) -> Condition:
    """Parse N or A:B, both ends included; a missing end is open."""
    low, colon, high = text.partition(":")
    try:
        first = -math.inf if colon and not low else int(low)
        last = first if not colon else int(high) if high else math.inf
    except ValueError:
        raise DataError(f"--step '{text}': expected a policy version or a range of them, such as 12 or 10:20") from None
    if first > last:
        raise DataError(f"--step '{text}': expected the lower version first, such as {last}:{first}")
    return lambda record: first <= record.policy_version <= last


def parse_sample(text: str) -> Condition:
    """Parse GROUP/INDEX, or GROUP/INDEX.PART for a single trajectory of a sample with several."""
    found = re.fullmatch(r"(-?\d+)/(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise DataError(f"--sample '{text}': expected GROUP/INDEX as in the trajectory's first line, such as 40/3")
    group_id, sample_index, part_index = (None if digits is None else int(digits) for digits in found.groups())
    return lambda record: (
        (record.group_id, record.sample_index) == (group_id, sample_index) and part_index in {None, record.part_index}
    )


def parse_life(text: str) -> SampleId:
    """Parse GROUP/INDEX of a train sample."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise DataError(f"--life '{text}': expected GROUP/INDEX of a train sample, such as 40/3")
    return int(found[1]), int(found[2])


def parse_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        advice = "escape ( [ * + ? . with a backslash"
        raise DataError(f"--grep '{text}': expected a regular expression: {error}; {advice}") from None


def contains(pattern: re.Pattern[str]) -> Condition:
    return lambda record: pattern.search(record.prompt) is not None or pattern.search(record.completion) is not None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest name, and all names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}expected {'one of ' if len(names) > 1 else ''}{', '.join(names) or 'none'}"


def _known(option: str, text: str, name: str, known: Sequence[str]) -> None:
    if not name.startswith(PART) and name not in known:
        raise DataError(f"{option} '{text}': no field '{name}'; {did_you_mean(name, (*known, 'reward.NAME'))}")
