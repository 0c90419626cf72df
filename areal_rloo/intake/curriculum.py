"""Draws the next prompts of a source by weights, which the user's function `data.curriculum` gives.

    items of a source, past rewards of each ─► the user's function ─► a weight for each item ─► draws, with repetition

The function is called before the first prompt of a source, and again after every batch of prompts
(`learner.groups_per_step`). In between the weights stay. So a draw is a function of the seed, a count and the weights.
A checkpoint keeps weights and rewards, and a resume draws the prompts of an unbroken run. Every complete
group counts, also a group dropped by a filter, because many such groups have no signal. Called on the intake's loop.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from areal_rloo.algorithm.own_function import OwnFunction
from areal_rloo.config import Config
from areal_rloo.errors import DataError
from areal_rloo.trajectory import MOST_REWARD, Group, Item
from areal_rloo.wire.messages import Count

MOST_REWARDS = 8  # kept of an item: the newest
_NAMES = ("items", "rewards")

Reward = Annotated[float, msgspec.Meta(ge=-MOST_REWARD, le=MOST_REWARD)]


class CurriculumState(msgspec.Struct, frozen=True):
    """The present weights and the past rewards in a checkpoint."""

    sums: dict[Count, bytes]  # by the first item of a source, the running sums of the weights, float64
    rewards: dict[Count, list[Reward]]  # by the number of the item among those of all sources


class Curriculum:
    """The weights of the items of all train sources."""

    def __init__(self, path: str, sources: Sequence[Sequence[Item]], *, seed: int, every: int) -> None:
        """Import the function at `path`, and try it with the items of every source.

        `every`: prompts of a source between two calls of the function.

        Raises:
            ConfigError: the function cannot be imported or called.
            UserError: the function raised, or returned no weights.
        """
        self._own = OwnFunction("data.curriculum", path, _NAMES)
        self._seed, self._every = seed, every
        firsts = accumulate((len(items) for items in sources), initial=0)
        self._sources = dict(zip(firsts, sources, strict=False))  # by the number of the first item
        self._num_items = sum(len(items) for items in sources)
        self._sums: dict[int, npt.NDArray[np.float64]] = {}
        self._rewards: dict[int, list[float]] = {}
        for items in sources:
            self._try(items)

    def draw(self, first: int, num_taken: int) -> int:
        """Return the number of an item of the source with the first item `first`, after so many prompts.

        Raises:
            UserError: the function raised, or returned no weights.
        """
        if first not in self._sums or num_taken % self._every == 0:
            items = self._sources[first]
            rewards = [tuple(self._rewards.get(first + index, ())) for index in range(len(items))]
            self._sums[first] = self._running_sums(items, rewards)
        sums = self._sums[first]
        share: float = np.random.default_rng([self._seed, first, num_taken]).random()
        below = min(share * sums[-1], np.nextafter(sums[-1], 0))  # a product may round up to the whole
        return first + int(np.searchsorted(sums, below, side="right"))

    def note(self, group: Group) -> None:
        """Note the mean reward of a complete group."""
        past = self._rewards.setdefault(group.item_index, [])
        past.append(statistics.fmean(sample.reward for sample in group.samples))
        del past[:-MOST_REWARDS]

    def state(self) -> CurriculumState:
        sums = {first: values.tobytes() for first, values in self._sums.items()}
        return CurriculumState(sums, {index: list(past) for index, past in self._rewards.items()})

    def restore(self, state: CurriculumState | None) -> None:
        """Continue from a checkpoint; None if the run had no curriculum.

        Raises:
            DataError: the checkpoint has weights or rewards of other items.
        """
        if state is None:
            return
        for first, sums in state.sums.items():
            if len(sums) != 8 * len(self._sources.get(first, ())) or not _rising(np.frombuffer(sums)):
                raise DataError(f"data.curriculum: the weights in the checkpoint do not fit the source at item {first}")
        if max(state.rewards, default=0) >= self._num_items:
            raise DataError(f"data.curriculum: expected rewards of items below {self._num_items} in the checkpoint")
        self._sums = {first: np.frombuffer(sums) for first, sums in state.sums.items()}
        self._rewards = {index: list(past) for index, past in state.rewards.items()}

    def _running_sums(self, items: Sequence[Item], rewards: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
        returned: Any = self._own(items=items, rewards=rewards)
        expected = f"expected a weight of at least 0 for each of the {len(items)} items, and one above 0"
        try:
            weights = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError):  # of a list with other values, or of a tensor with a gradient
            self._own.refuse(f"returned a value of the type {type(returned).__name__}, {expected}")
        if weights.shape != (len(items),):
            self._own.refuse(f"returned {list(weights.shape)} numbers, {expected}")
        sums: npt.NDArray[np.float64] = np.cumsum(weights)
        wrong = weights[~(np.isfinite(weights) & (weights >= 0))]
        if len(wrong) or not (np.isfinite(sums[-1]) and sums[-1] > 0):
            found = f"the weight {wrong[0]:g}" if len(wrong) else f"weights with the sum {sums[-1]:g}"
            self._own.refuse(f"returned {found}, {expected}")
        return sums

    def _try(self, items: Sequence[Item]) -> None:
        """Call the function without rewards, and with random rewards of some items."""
        random = np.random.default_rng(0)
        some = [tuple(random.random(number).tolist()) for number in random.integers(0, MOST_REWARDS + 1, len(items))]
        self._running_sums(items, [()] * len(items))
        if not np.array_equal(self._running_sums(items, some), self._running_sums(items, some)):
            self._own.refuse("returned other weights for the same rewards; use no random numbers: the draws are random")


def _rising(sums: npt.NDArray[np.float64]) -> bool:
    rises = len(sums) > 0 and sums[0] >= 0 and sums[-1] > 0 and (np.diff(sums) >= 0).all()
    return bool(rises and np.isfinite(sums).all())


def load_curriculum(config: Config, sources: Sequence[Sequence[Item]]) -> Curriculum | None:
    """Import and try the curriculum of a config with these items; None if there is none. Raises like `Curriculum`."""
    path = config.data.curriculum
    if path is None:
        return None
    return Curriculum(path, sources, seed=config.run.seed, every=config.learner.groups_per_step)
