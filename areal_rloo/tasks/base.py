"""What a task is: items with a prompt and an answer, and a reward for a completion.

The learner takes items from here into its prompt stream; a rollout worker calls `reward` with the completion's text.
Imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a task: what is asked, and what a completion is compared with."""

    prompt: str
    answer: str


class Task(Protocol):
    """A source of items with a train and a held-out split that share no item."""

    def items(self, split: Split) -> Sequence[Item]:
        """All items of a split, in a fixed order; may be made on access.

        Raises:
            DataError: the data cannot be read; says where and what to do.
        """

    def reward(self, completion_text: str, answer: str) -> float:
        """Score a completion; deterministic, finite."""
