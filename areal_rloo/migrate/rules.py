"""The form of a rule, for settings of another system. The names that a rule takes are a pattern, as in `fnmatch`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Options = dict[str, Any]
Given = Mapping[str, Any]
Make = Callable[[Any, Given], Options]
"""Options of ours, by key, from the value of a setting and all settings."""


class UnreadableError(ValueError):
    """A value that a rule cannot read; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The translation of a setting, or the reason why there is none.

    Attributes:
        make: gives our options; None: there is no counterpart.
        why: for the report.
        by_hand: the user must do something, which `why` says.
    """

    make: Make | None = None
    why: str = ""
    by_hand: bool = False


def to(key: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> Rule:
    """Make the rule of a setting that is our option `key`, perhaps with a converted value."""
    return Rule(lambda value, given: {key: convert(value)}, why)


def made(make: Make, why: str = "") -> Rule:
    """Make the rule of a setting from which, with others, several options follow."""
    return Rule(make, why)


def choice(options: Mapping[Any, Options], why: str = "") -> Rule:
    """Make the rule of a setting with few values, each with our options."""

    def make(value: Any, given: Given) -> Options:
        if isinstance(value, list | dict) or value not in options:
            raise UnreadableError(f"expected one of {', '.join(map(str, options))}{'; ' if why else ''}{why}")
        return dict(options[value])

    return Rule(make, why)


def absent(why: str) -> Rule:
    """Make the rule of a setting without a counterpart."""
    return Rule(why=why)


def by_hand(why: str) -> Rule:
    """Make the rule of a setting that the user must replace."""
    return Rule(why=why, by_hand=True)


def slug(name: Any) -> str:
    """Make a name of a run from any text."""
    return re.sub(r"[^\w.+=@-]+", "-", str(name)).strip("-")[:64] or "run"


def number(value: Any) -> float:
    """Read a number.

    Raises:
        UnreadableError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableError("expected a number")
    return value


def whole(value: Any) -> int:
    """Read an integer of at least 1.

    Raises:
        UnreadableError: the value is none.
    """
    found = number(value)
    if found != int(found) or found < 1:
        raise UnreadableError("expected an integer of at least 1")
    return int(found)


GSM8K = {"data.train": {"task": "gsm8k"}, "data.eval": {"task": "gsm8k"}}


def source(name: Any) -> Options:
    """Choose the source of prompts for the name or path of a data set: a built-in task, a file, or rows of the hub."""
    text = str(name)
    for task in ("gsm8k", "svamp"):
        if task in text.lower():
            return {"task": task}
    if re.search(r"(^|[/_-])math([/_.-]|$)|math-?500", text.lower()):
        return {"task": "math"}
    if text.endswith((".parquet", ".jsonl", ".json", ".csv")):
        return {"task": "rows", "path": text}
    return {"task": "rows", "hub": text}


TELEMETRY = absent("metrics, logs and reports of a run are always written; trackers are telemetry.trackers")
SPEED = absent("an option of that system's speed or memory; see docs/learner.md for ours")
DEFAULT = absent("always so here")
