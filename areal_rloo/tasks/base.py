"""What a task is: items with a prompt and an answer, and a reward for a completion.

The learner takes items from here into its prompt stream; a rollout worker calls `reward` with the completion's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a task: what is asked, and what a completion is compared with."""

    prompt: str
    answer: str


class Task(Protocol):
    """A source of items with a train and a held-out split that share no item."""

    def train_items(self) -> Sequence[Item]:
        """The train split, in a fixed order."""

    def eval_items(self) -> Sequence[Item]:
        """The held-out split, in a fixed order."""

    def reward(self, completion_text: str, answer: str) -> float:
        """Score a completion; deterministic, finite."""
