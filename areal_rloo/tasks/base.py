"""The interface of a task, and the parts that tasks share: lazy items and checks of a source."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import SourceError
from areal_rloo.trajectory import Item, Message

__all__ = ["Item", "LazyItems", "Message", "Split", "Task", "check_parameters", "closest", "refuse_files"]

Split = Literal["train", "eval"]


class Task(ABC):
    """A kind of data and the reward, made from a source of the config and the run's seed.

    Your own task is a subclass, named in the config as `module:Class` or `path/to/file.py:Class`. The learner calls
    `Class(source, seed)` for the items, and each reward process calls it for the rewards.
    """

    @abstractmethod
    def items(self, split: Split) -> Sequence[Item]:
        """Return the items of a split: always the same items in the same order.

        Raises:
            DataError: the data cannot be read; names the file, the line and the field.
        """

    @abstractmethod
    def reward(self, completion: str, item: Item) -> float:
        """Score a completion of this item. Runs in a reward process, where a hang or a crash is safe."""

    def check_answer(self, item: Item) -> None:
        """Check that `reward` can read the answer of an item of another task, before a run starts.

        Raises:
            DataError: the reward cannot read the answer.
        """
        del item

    def final_answer(self, completion: str) -> str | None:
        """Return a completion's answer in a normal form, for majority votes; None if there is no answer."""
        del completion
        return None

    def demonstration(self, item: Item) -> str:
        """Return a correct completion, for few-shot prompts and `areal-rloo sft`."""
        return item.answer

    def turns(self, item: Item) -> Sequence[Message]:
        """Return the messages after the prompt for `areal-rloo sft`, which learns those of the assistant."""
        return (Message("assistant", self.demonstration(item)),)


class LazyItems(Sequence[Item]):
    """Items made on access, each from an index."""

    def __init__(self, num: int, make: Callable[[int], Item]) -> None:
        self._indices = range(num)
        self._make = make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self._make(i) for i in self._indices[index]]
        return self._make(self._indices[index])


def closest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Write the hint of an error message: the known name that is close to a wrong name, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else otherwise


def check_parameters(source: ConfiguredSource, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a task, updated with the parameters of a source.

    Raises:
        SourceError: the task has no such parameter, or the value and the default have different types.
    """
    for name, value in source.parameters.items():
        if name not in defaults:
            hint = closest(name, defaults, f"it has {', '.join(defaults) or 'none'}")
            raise SourceError(f"parameters.{name}: the task has no such parameter; {hint}")
        if type(value) is not type(defaults[name]) and (type(value), type(defaults[name])) != (int, float):
            expected = type(defaults[name]).__name__
            raise SourceError(f"parameters.{name}: expected {expected}, got {value!r}")
    return {**defaults, **source.parameters}


def refuse_files(source: ConfiguredSource) -> None:
    """Refuse data of a source, for tasks that generate their items.

    Raises:
        SourceError: the source names a file, a hub dataset, or fields.
    """
    for key in ("path", "hub", "hub_split", "fields"):
        if getattr(source, key):
            raise SourceError(f"{key}: the task {source.task} generates its items; leave {key} out")
