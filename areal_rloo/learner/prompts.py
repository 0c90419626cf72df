"""The prompt stream: items of the train split, tokenized, in a seeded order that a checkpoint can continue.

The intake takes prompts one by one when admission allows a group; a prompt whose group was dropped for staleness comes
back and is handed out before the next one. Every item of an epoch is handed out once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from areal_rloo.config import DataConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item


@dataclass(frozen=True, slots=True)
class Prompt:
    """An item, tokenized. `epoch` and `item_index` name its place in the data."""

    epoch: int
    item_index: int
    tokens: tuple[int, ...]
    answer: str


class PromptStreamState(msgspec.Struct, frozen=True):
    """Where a stream stands: what a checkpoint keeps. `returned` holds (epoch, item_index) pairs."""

    epoch: int
    position: int
    returned: list[tuple[int, int]]


class PromptStream:
    """Shuffled items without end, or for `num_epochs`."""

    def __init__(
        self, items: Sequence[Item], tokenize: Callable[[Item], tuple[int, ...]], *, seed: int, num_epochs: int | None
    ) -> None:
        if not items:
            raise DataError("data.train: the train split holds no item")
        self._items = items
        self._tokenize = tokenize
        self._seed = seed
        self._num_epochs = num_epochs
        self._epoch = 0
        self._position = 0
        self._returned: list[tuple[int, int]] = []
        self._order = self._shuffled(0)

    def take(self) -> Prompt | None:
        """The next prompt, or None when the last epoch has been handed out."""
        if self._returned:
            return self.prompt(*self._returned.pop(0))
        if self._position == len(self._items):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        if self._num_epochs is not None and self._epoch >= self._num_epochs:
            return None
        self._position += 1
        return self.prompt(self._epoch, int(self._order[self._position - 1]))

    def give_back(self, epoch: int, item_index: int) -> None:
        """Hand this prompt out again, before any other."""
        self._returned.append((epoch, item_index))

    def prompt(self, epoch: int, item_index: int) -> Prompt:
        """The prompt at a place in the data."""
        item = self._items[item_index]
        return Prompt(epoch, item_index, self._tokenize(item), item.answer)

    def state(self) -> PromptStreamState:
        return PromptStreamState(self._epoch, self._position, list(self._returned))

    def restore(self, state: PromptStreamState) -> None:
        self._epoch, self._position = state.epoch, state.position
        self._returned = list(state.returned)
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._items))


class Tokenizer:
    """Turns an item into prompt tokens: plain, or through the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        has_template = tokenizer.chat_template is not None
        if data.chat_template and not has_template:
            raise DataError("data.chat_template: true, but the model's tokenizer has no chat template; set it to null")
        self._tokenizer = tokenizer
        self._data = data
        self._use_template = has_template if data.chat_template is None else data.chat_template

    def __call__(self, item: Item) -> tuple[int, ...]:
        """Token ids of the prompt.

        Raises:
            DataError: it is longer than `data.max_prompt_tokens`; names the prompt.
        """
        system = self._data.system_prompt
        if self._use_template:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": item.prompt})
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = f"{system}\n{item.prompt}" if system else item.prompt
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=not self._use_template))
        if len(tokens) > self._data.max_prompt_tokens:
            raise DataError(
                f"data.max_prompt_tokens: expected at most {self._data.max_prompt_tokens}, got {len(tokens)} tokens "
                f"for the prompt {item.prompt[:60]!r}; raise it, or leave the item out of the data"
            )
        return tokens
