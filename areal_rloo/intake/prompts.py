"""The prompt stream: items of the train sources, tokenized, in a seeded order that a checkpoint can continue.

The intake takes a prompt for every group it admits. The prompt of a dropped stale group is handed out again first. Each
source is read in passes: every item once, in an order drawn for the pass, before any item comes again. Items too long
under `data.overlong_prompts: filter` are skipped and counted.

A mixture of sources with shares s_i: of the first t prompts, source i has had t_i, and the next one is of the source
with the largest s_i (t + 1) - t_i. So no source is ever more than a single prompt ahead of the share, and a checkpoint
keeps only the counts t_i. Without weights the shares are the sizes, and all passes end together. With a curriculum the
items of a source come by weights instead, and a pass is only a number of prompts.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from areal_rloo.errors import DataError
from areal_rloo.intake.curriculum import Curriculum, CurriculumState
from areal_rloo.tasks import Source, check_same_sources
from areal_rloo.trajectory import Item
from areal_rloo.wire.messages import Count

Tokenize = Callable[[Item, int], tuple[int, ...] | None]
"""Returns the token ids of an item, which has this number in its source; None for an item to leave out."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized item. `epoch` (pass through the source) and `item_index` name the place in the data.

    Item numbers run through all sources, in the order of the config.
    """

    epoch: int
    item_index: int
    tokens: tuple[int, ...]
    item: Item
    encoded: bytes = field(init=False, repr=False, compare=False)  # the tokens as int32: fast to compare

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoded", array("i", self.tokens).tobytes())


class PromptStreamState(msgspec.Struct, frozen=True):
    """The position of a stream in a checkpoint. `returned` holds (epoch, item_index) pairs."""

    sources: list[str]  # their descriptions, to notice other sources on a resume
    taken: list[Count]  # items handed out or skipped, by source
    returned: list[tuple[Count, Count]]
    num_filtered: Count
    curriculum: CurriculumState | None = None  # None: the run has none


class PromptStream:
    """Shuffled items without end, or `num_epochs` passes through every source."""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenize: Tokenize,
        *,
        seed: int,
        num_epochs: int | None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._sources = [
            _Passes(source, seed=seed, index=index, first=sum(len(s.items) for s in sources[:index]))
            for index, source in enumerate(sources)
        ]
        weights = [Fraction(len(s.items) if s.weight is None else s.weight) for s in sources]
        whole = math.lcm(*(weight.denominator for weight in weights))  # whole numbers are ten times as fast
        self._shares = [int(weight * whole) for weight in weights]
        self.curriculum = curriculum
        self._described = [source.description for source in sources]
        self._tokenize = tokenize
        self._num_epochs = num_epochs
        self._returned: list[tuple[int, int]] = []
        self.num_filtered = 0  # prompts left out for their length, since the start

    def take(self) -> Prompt | None:
        """Return the next prompt; None after the last epoch.

        Raises:
            DataError: no item is short enough.
        """
        if self._returned:
            return self.prompt(*self._returned.pop(0))
        # Give up after every item was tried, however small the share of its source: this pass, and most of the next.
        last = [source.num_taken + 2 * len(source.items) for source in self._sources]
        while any(source.num_taken < end for source, end in zip(self._sources, last, strict=True)):
            if self.exhausted:
                if self.num_filtered < sum(source.num_taken for source in self._sources):
                    return None
                break
            prompt = self._tokenized(*self._next_source().take(self.curriculum))
            if prompt is not None:
                return prompt
            self.num_filtered += 1
        num_items = sum(len(source.items) for source in self._sources)
        raise DataError(
            f"data.max_prompt_tokens: none of the {num_items} prompts is short enough; raise it, or set "
            "data.overlong_prompts=truncate_left"
        )

    def give_back(self, epoch: int, item_index: int) -> None:
        """Return a prompt to the stream; the prompt goes out again before any other."""
        self._returned.append((epoch, item_index))

    def prompt(self, epoch: int, item_index: int) -> Prompt:
        """Return the prompt at a place handed out before.

        Raises:
            DataError: there is no such item, or the prompt is too long under the current config.
        """
        self._check_index(item_index)
        prompt = self._tokenized(epoch, item_index)
        if prompt is None:
            raise DataError(
                "data.max_prompt_tokens: a prompt in the checkpoint is longer; resume with the value the run had"
            )
        return prompt

    @property
    def exhausted(self) -> bool:
        """True if no prompt is left."""
        return not self.num_left

    @property
    def num_left(self) -> int:
        """The number of prompts left, with those too long."""
        num = self._num_epochs
        coming = sys.maxsize if num is None else sum(max(0, num * len(s.items) - s.num_taken) for s in self._sources)
        return len(self._returned) + coming

    @property
    def epoch(self) -> float:
        """Passes through the prompts, as far as handed out or left out."""
        return sum(s.num_taken for s in self._sources) / sum(len(s.items) for s in self._sources)

    def state(self) -> PromptStreamState:
        taken = [source.num_taken for source in self._sources]
        curriculum = None if self.curriculum is None else self.curriculum.state()
        return PromptStreamState(self._described, taken, list(self._returned), self.num_filtered, curriculum)

    def restore(self, state: PromptStreamState) -> None:
        """Continue from a checkpoint.

        Raises:
            DataError: the checkpoint was made with other sources, has no count for a source, or names an unknown item.
        """
        check_same_sources(state.sources, self._described)
        if len(state.taken) != len(self._sources):
            raise DataError(f"data.train: expected the items taken of each source, got {state.taken} in the checkpoint")
        for _, item_index in state.returned:
            self._check_index(item_index)
        for source, taken in zip(self._sources, state.taken, strict=True):
            source.num_taken = taken
        if self.curriculum is not None:
            self.curriculum.restore(state.curriculum)
        self._returned, self.num_filtered = list(state.returned), state.num_filtered

    def _check_index(self, item_index: int) -> None:
        num_items = sum(len(source.items) for source in self._sources)
        if not 0 <= item_index < num_items:
            raise DataError(f"data.train: expected items 0 to {num_items - 1}, got {item_index} in the checkpoint")

    def _next_source(self) -> _Passes:
        total, num = sum(self._shares), 1 + sum(source.num_taken for source in self._sources)
        ahead = [s.num_taken * total - share * num for s, share in zip(self._sources, self._shares, strict=True)]
        return self._sources[ahead.index(min(ahead))]

    def _tokenized(self, epoch: int, item_index: int) -> Prompt | None:
        source = next(s for s in reversed(self._sources) if s.first <= item_index)
        item = source.items[item_index - source.first]
        tokens = self._tokenize(item, 1 + item_index - source.first)
        return None if tokens is None else Prompt(epoch, item_index, tokens, item)


class _Passes:
    """A source: its items in passes, each pass in its own order; or as drawn by a curriculum."""

    def __init__(self, source: Source, *, seed: int, index: int, first: int) -> None:
        self.items = source.items
        self.first = first  # number of the first item among those of all sources
        self.num_taken = 0
        self._seed = [seed, index] if index else [seed]
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    def take(self, curriculum: Curriculum | None) -> tuple[int, int]:
        """Return the next place: the pass, and the number of the item."""
        epoch, position = divmod(self.num_taken, len(self.items))
        if curriculum is not None:
            self.num_taken += 1
            return epoch, curriculum.draw(self.first, self.num_taken - 1)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([*self._seed, epoch]).permutation(len(self.items)))
        self.num_taken += 1
        return epoch, self.first + int(self._order[1][position])
