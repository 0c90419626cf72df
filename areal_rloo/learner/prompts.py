"""The prompt stream: items of the train sources, tokenized, in a seeded order that a checkpoint can continue.

The intake takes prompts one by one when admission allows a group; a prompt whose group was dropped for staleness comes
back and is handed out before the next one. Each source is gone through in passes: every item once, in an order of its
own, before any comes again; those too long under `data.overlong_prompts: filter` are passed over and counted.

A mixture of sources with shares s_i: of the first t prompts, source i has had t_i, and the next one is of the source
with the largest s_i (t + 1) - t_i. So no source is ever more than one prompt ahead of its share, and the counts t_i are
all there is to keep. Without weights the shares are the sizes, and all passes end together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from areal_rloo.config import DataConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks import Source
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Item

Tokenize = Callable[[Item], tuple[int, ...] | None]
"""An item's token ids, or None for one to leave out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """An item, tokenized. `epoch` (which pass through its source) and `item_index` name its place in the data.

    Items are numbered through all sources, in the config's order.
    """

    epoch: int
    item_index: int
    tokens: tuple[int, ...]
    item: Item


class PromptStreamState(msgspec.Struct, frozen=True):
    """Where a stream stands: what a checkpoint keeps. `returned` holds (epoch, item_index) pairs."""

    sources: list[str]  # what they are, so that others are noticed
    taken: list[int]  # items handed out or passed over, by source
    returned: list[tuple[int, int]]
    num_filtered: int


class PromptStream:
    """Shuffled items without end, or until every source was gone through `num_epochs` times."""

    def __init__(self, sources: Sequence[Source], tokenize: Tokenize, *, seed: int, num_epochs: int | None) -> None:
        self._sources = [
            _Passes(source, seed=seed, index=index, first=sum(len(s.items) for s in sources[:index]))
            for index, source in enumerate(sources)
        ]
        self._num_items = sum(len(source.items) for source in sources)
        self._tokenize = tokenize
        self._num_epochs = num_epochs
        self._returned: list[tuple[int, int]] = []
        self._num_filtered = 0

    def take(self) -> Prompt | None:
        """The next prompt, or None when the last epoch has been handed out.

        Raises:
            DataError: no item at all is short enough.
        """
        if self._returned:
            return self.prompt(*self._returned.pop(0))
        # Until all of each source was tried in vain, however rarely its turn comes: the rest of a pass, and nearly all
        # of the next.
        last = [source.num_taken + 2 * len(source.items) for source in self._sources]
        while any(source.num_taken < end for source, end in zip(self._sources, last, strict=True)):
            if self._ended():
                if self._num_filtered < sum(source.num_taken for source in self._sources):
                    return None
                break
            place = self._next_source().take()
            prompt = self._tokenized(*place)
            if prompt is not None:
                return prompt
            self._num_filtered += 1
        raise DataError(
            f"data.max_prompt_tokens: none of the {self._num_items} prompts is short enough; raise it, or set "
            "data.overlong_prompts=truncate"
        )

    def give_back(self, epoch: int, item_index: int) -> None:
        """Hand this prompt out again, before any other."""
        self._returned.append((epoch, item_index))

    def prompt(self, epoch: int, item_index: int) -> Prompt:
        """The prompt at a place in the data that was handed out once.

        Raises:
            DataError: it is too long by now.
        """
        prompt = self._tokenized(epoch, item_index)
        if prompt is None:
            raise DataError(
                "data.max_prompt_tokens: a prompt that the checkpoint holds is longer; resume with what the run had"
            )
        return prompt

    @property
    def num_returned(self) -> int:
        """Prompts that came back and wait to be handed out again."""
        return len(self._returned)

    @property
    def num_filtered(self) -> int:
        """Prompts left out for their length, since the start."""
        return self._num_filtered

    def state(self) -> PromptStreamState:
        taken = [source.num_taken for source in self._sources]
        return PromptStreamState(self._described(), taken, list(self._returned), self._num_filtered)

    def restore(self, state: PromptStreamState) -> None:
        """Go on from a checkpoint.

        Raises:
            DataError: it was made with other sources.
        """
        if state.sources != self._described():
            raise DataError(
                f"data.train: the checkpoint was made with {', '.join(state.sources)}; got "
                f"{', '.join(self._described())}; resume with the config and the data it was made with"
            )
        for source, taken in zip(self._sources, state.taken, strict=True):
            source.num_taken = taken
        self._returned, self._num_filtered = list(state.returned), state.num_filtered

    def _described(self) -> list[str]:
        return [source.description for source in self._sources]

    def _ended(self) -> bool:
        return self._num_epochs is not None and all(s.num_passes >= self._num_epochs for s in self._sources)

    def _next_source(self) -> _Passes:
        total = sum(source.share for source in self._sources)
        num = 1 + sum(source.num_taken for source in self._sources)
        return max(self._sources, key=lambda source: source.share * num - source.num_taken * total)

    def _tokenized(self, epoch: int, item_index: int) -> Prompt | None:
        source = next(s for s in reversed(self._sources) if s.first <= item_index)
        item = source.items[item_index - source.first]
        tokens = self._tokenize(item)
        return None if tokens is None else Prompt(epoch, item_index, tokens, item)


class _Passes:
    """One source: its items in passes, each in an order of its own."""

    def __init__(self, source: Source, *, seed: int, index: int, first: int) -> None:
        self.items = source.items
        looked_at = [source.items[at].text for at in (0, len(source.items) // 2, len(source.items) - 1)]
        digest = zlib.crc32("\0".join(looked_at).encode(errors="surrogatepass"))
        self.description = f"{source.label} ({len(source.items)} items, {digest:08x})"
        self.first = first  # number of its first item among those of all sources
        self.share = Fraction(len(source.items) if source.weight is None else source.weight)
        self.num_taken = 0
        self._seed = [seed, index] if index else [seed]
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    @property
    def num_passes(self) -> int:
        return self.num_taken // len(self.items)

    def take(self) -> tuple[int, int]:
        """The next place: which pass, and which item of all sources."""
        epoch, position = divmod(self.num_taken, len(self.items))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([*self._seed, epoch]).permutation(len(self.items)))
        self.num_taken += 1
        return epoch, self.first + int(self._order[1][position])


class Tokenizer:
    """Turns an item into prompt tokens, and minds how long they may be."""

    def __init__(self, chat: ChatFormat, data: DataConfig) -> None:
        self._chat = chat
        self._data = data
        self.num_truncated = 0  # prompts cut to their end so far

    def __call__(self, item: Item) -> tuple[int, ...] | None:
        """Token ids of the prompt; None for one to leave out.

        Raises:
            DataError: it is longer than `data.max_prompt_tokens`, and that is to be an error; names the prompt.
        """
        tokens = self._chat.prompt(item)
        most = self._data.max_prompt_tokens
        if len(tokens) <= most:
            return tokens
        match self._data.overlong_prompts:
            case "filter":
                return None
            case "truncate":
                self.num_truncated += 1
                return tokens[-most:]
            case "error":
                raise DataError(
                    f"data.max_prompt_tokens: expected at most {most}, got {len(tokens)} tokens for the prompt "
                    f"{item.text[:60]!r}; raise it, or set data.overlong_prompts to filter or truncate"
                )
