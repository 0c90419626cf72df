"""The prompt stream: items of the train split, tokenized, in a seeded order that a checkpoint can continue.

The intake takes prompts one by one when admission allows a group; a prompt whose group was dropped for staleness comes
back and is handed out before the next one. Every item of an epoch is handed out once, but for those that are too long
under `data.overlong_prompts: filter`, which are counted.
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

Tokenize = Callable[[Item], tuple[int, ...] | None]
"""An item's token ids, or None for one to leave out."""


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
    num_filtered: int


class PromptStream:
    """Shuffled items without end, or for `num_epochs`."""

    def __init__(self, items: Sequence[Item], tokenize: Tokenize, *, seed: int, num_epochs: int | None) -> None:
        if not items:
            raise DataError("data.train: the train split holds no item")
        self._items = items
        self._tokenize = tokenize
        self._seed = seed
        self._num_epochs = num_epochs
        self._epoch = 0
        self._position = 0
        self._returned: list[tuple[int, int]] = []
        self._num_filtered = 0
        self._order = self._shuffled(0)

    def take(self) -> Prompt | None:
        """The next prompt, or None when the last epoch has been handed out.

        Raises:
            DataError: no item at all is short enough.
        """
        if self._returned:
            return self.prompt(*self._returned.pop(0))
        for _ in range(2 * len(self._items)):
            if not self._advance():
                if self._num_filtered < len(self._items) * (self._num_epochs or 1):
                    return None
                break
            item_index = int(self._order[self._position - 1])
            tokens = self._tokenize(self._items[item_index])
            if tokens is not None:
                return Prompt(self._epoch, item_index, tokens, self._items[item_index].answer)
            self._num_filtered += 1
        raise DataError(
            f"data.max_prompt_tokens: none of the {len(self._items)} prompts is short enough; raise it, or set "
            "data.overlong_prompts=truncate"
        )

    def _advance(self) -> bool:
        """Go to the next place, over the end of an epoch; False after the last one."""
        if self._position == len(self._items):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        if self._num_epochs is not None and self._epoch >= self._num_epochs:
            return False
        self._position += 1
        return True

    def give_back(self, epoch: int, item_index: int) -> None:
        """Hand this prompt out again, before any other."""
        self._returned.append((epoch, item_index))

    def prompt(self, epoch: int, item_index: int) -> Prompt:
        """The prompt at a place in the data that was handed out once."""
        item = self._items[item_index]
        tokens = self._tokenize(item)
        assert tokens is not None, f"item {item_index} was too long to be handed out"
        return Prompt(epoch, item_index, tokens, item.answer)

    @property
    def num_filtered(self) -> int:
        """Prompts left out for their length, since the start."""
        return self._num_filtered

    def state(self) -> PromptStreamState:
        return PromptStreamState(self._epoch, self._position, list(self._returned), self._num_filtered)

    def restore(self, state: PromptStreamState) -> None:
        self._epoch, self._position = state.epoch, state.position
        self._returned, self._num_filtered = list(state.returned), state.num_filtered
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

    def __call__(self, item: Item) -> tuple[int, ...] | None:
        """Token ids of the prompt; None for one to leave out.

        Raises:
            DataError: it is longer than `data.max_prompt_tokens`, and that is to be an error; names the prompt.
        """
        system = self._data.system_prompt
        if self._use_template:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": item.prompt})
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = f"{system}\n{item.prompt}" if system else item.prompt
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=not self._use_template))
        most = self._data.max_prompt_tokens
        if len(tokens) <= most:
            return tokens
        match self._data.overlong_prompts:
            case "filter":
                return None
            case "truncate":
                return tokens[-most:]
            case "error":
                raise DataError(
                    f"data.max_prompt_tokens: expected at most {most}, got {len(tokens)} tokens for the prompt "
                    f"{item.prompt[:60]!r}; raise it, or set data.overlong_prompts to filter or truncate"
                )
