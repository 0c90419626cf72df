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


class Expression(str):
    """The text of a Python expression: its value is unknown, because the file is not run."""

    __slots__ = ()


class UnreadableError(ValueError):
    """A value that a rule cannot read; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The translation of a setting, or the reason why there is none.

    Attributes:
        make: gives our options; None: there is no counterpart.
        why: for the report.
        by_hand: the user must do something, which `why` says.
        decides: the algorithm follows from the setting: a value that cannot be read makes the config incomplete.
        by_name: the name of a Python object is enough.
    """

    make: Make | None = None
    why: str = ""
    by_hand: bool = False
    decides: bool = False
    by_name: bool = False


def to(key: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> Rule:
    """Make the rule of a setting that is our option `key`, perhaps with a converted value."""
    return Rule(lambda value, given: {key: convert(value)}, why)


def made(make: Make, why: str = "") -> Rule:
    """Make the rule of a setting from which, with others, several options follow."""
    return Rule(make, why)


def choice(options: Mapping[Any, Options], why: str = "", *, decides: bool = False) -> Rule:
    """Make the rule of a setting with few values, each with our options."""

    def make(value: Any, given: Given) -> Options:
        if isinstance(value, list | dict) or value not in options:
            raise UnreadableError(f"expected one of {', '.join(map(str, options))}{'; ' if why else ''}{why}")
        return dict(options[value])

    return Rule(make, why, decides=decides)


def each(names: str, rule: Rule, prefix: str = "") -> dict[str, Rule]:
    """Give a rule to many settings, whose names are in a text with spaces."""
    return dict.fromkeys((f"{prefix}{name}" for name in names.split()), rule)


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


_TASKS = {  # the sets that a task reads from the hub, by their names there and in verl's prepared folders
    "gsm8k": (r"(^|/)gsm8k(/(main|train|test)(\.parquet)?)?$", r"^openai/gsm8k$"),
    "svamp": (r"(^|/)svamp(/(train|test)(\.parquet|\.json)?)?$",),
    "math": (r"(^|/)math/(train|test)\.parquet$", r"^(hendrycks/competition_math|DigitalLearningGmbH/MATH-lighteval)$"),
}


def source(name: Any) -> Options:
    """Choose the source of prompts for the name or path of a data set: a built-in task, a file, or rows of the hub."""
    text = str(name)
    for task, names in _TASKS.items():
        if any(re.search(name, text, re.IGNORECASE) for name in names):
            return {"task": task}
    if "$" in text:
        raise UnreadableError("a path that only the shell knows; set data.train.path")
    if text.endswith((".parquet", ".jsonl", ".json", ".csv")):
        return {"task": "rows", "path": text}
    return {"task": "rows", "hub": text}


def epochs(value: Any, given: Given) -> Options:
    """Train for epochs; the launcher counts their steps."""
    return {"data.num_epochs": whole(value), "learner.num_train_steps": "auto"}


def weight_decay(value: Any, given: Given) -> Options:
    """Decay all parameters, as these systems do."""
    return {"learner.optimizer.weight_decay": number(value), "learner.optimizer.decay_all": value > 0}


def adapters(rank: Any, alpha: Any, targets: Any) -> Options:
    """Train adapters; `targets`: names of layers, in a list or alone, or None or all-linear for all."""
    of_all = targets in (None, "all-linear", ["all-linear"])
    named = {} if of_all else {"targets": targets if isinstance(targets, list) else [targets]}
    return {"learner.lora": {"rank": whole(rank), "alpha": whole(alpha), **named}}


TELEMETRY = absent("metrics, logs and reports of a run are always written; trackers are telemetry.trackers")
SPEED = absent("speed or memory of that system; ours are in docs/learner.md")
DEFAULT = absent("always so here")
CRITIC = by_hand("there is no critic here: the baseline is the mean of a group")
