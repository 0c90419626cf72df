"""What a task is: where its items come from, and what a completion of one is worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from areal_rloo.trajectory import Item, Message

__all__ = ["Item", "Message", "Split", "Task"]

Split = Literal["train", "eval"]


class Task(ABC):
    """A kind of data and its reward. Made with the source of the config and the run's seed.

    A task of your own is a subclass, named in the config as `module:Class` or `path/to/file.py:Class`; it is called as
    `Class(source, seed)`, once in the learner for its items and once in each reward process for its rewards.
    """

    @abstractmethod
    def items(self, split: Split) -> Sequence[Item]:
        """The items of a split, always the same ones in the same order.

        Raises:
            DataError: the data cannot be read; names the file, the line and the field.
        """

    @abstractmethod
    def reward(self, completion: str, item: Item) -> float:
        """What a completion of this item is worth; called in a reward process, where it may hang or crash."""

    def final_answer(self, completion: str) -> str | None:
        """The answer of a completion in a form in which equal ones are equal, for majority votes; None without one."""
        del completion
        return None

    def demonstration(self, item: Item) -> str:
        """A completion that is right, for few-shot prompts."""
        return item.answer
