"""Sums of one-digit numbers, solved step by step in GSM8K's answer format.

    3+5+7=?     ─►     3+5=8
                       8+7=15
                       #### 15

Items are made on access from (seed, index). A hash of the text decides the split, so no problem is in two splits,
for any seeds. Sums have three to nine numbers, mostly few, which gives completion lengths a long tail.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Literal

from areal_rloo.config import ConfiguredSource
from areal_rloo.tasks.answers import answer_key, answer_reward, check_gold
from areal_rloo.tasks.base import Item, LazyItems, Split, Task, check_parameters, refuse_files

_COUNTS = (3, 4, 5, 6, 8, 9)
_NUM_TRAIN = 20_000
_NUM_HELD_OUT = 2_000

Part = Literal["train", "eval", "validation"]


def part_of(prompt: str) -> Part:
    """Return the split of a problem: 80 % train, 10 % held out, 10 % for the stopping rule of the warm start."""
    tenth = zlib.crc32(prompt.encode()) % 10
    return "eval" if tenth == 0 else "validation" if tenth == 1 else "train"


class ArithmeticTask(Task):
    """The task; `seed` draws the items."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        refuse_files(source)
        check_parameters(source, {})
        self._seed = seed

    def items(self, split: Split) -> Sequence[Item]:
        if split == "train":
            return LazyItems(_NUM_TRAIN, partial(_problem, "train", self._seed))
        return _held_out("eval")

    def validation_items(self) -> Sequence[Item]:
        """Return items outside both splits."""
        return _held_out("validation")

    def reward(self, completion: str, item: Item) -> float:
        return answer_reward(completion, item.answer)

    def check_answer(self, item: Item) -> None:
        check_gold(item)

    def final_answer(self, completion: str) -> str | None:
        return answer_key(completion)

    def demonstration(self, item: Item) -> str:
        return demonstration(item, random.Random(0), error_rate=0)


def demonstration(item: Item, rng: random.Random, *, error_rate: float) -> str:
    """Write the steps and the answer. A step is wrong with probability `error_rate`; later steps use the result."""
    first, *others = (int(number) for number in item.text.partition("=")[0].split("+"))
    lines, total = [], first
    for number in others:
        result = total + number
        if rng.random() < error_rate:
            result = max(1, result + rng.choice((-2, -1, 1, 2)))
        lines.append(f"{total}+{number}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"])


def _problem(part: Part, seed: int, index: int) -> Item:
    """Make a problem of a part, a function of (seed, index)."""
    rng = random.Random(f"{part}/{seed}/{index}")
    while True:
        numbers = rng.sample(range(1, 10), rng.choice(_COUNTS))
        prompt = "+".join(map(str, numbers)) + "=?\n"
        if part_of(prompt) == part:
            return Item(prompt, f"#### {sum(numbers)}")


def _held_out(part: Part) -> Sequence[Item]:
    """Return distinct problems. They are the same for every seed of a run, so runs are comparable."""
    problems = (_problem(part, 0, index) for index in range(2 * _NUM_HELD_OUT))
    return list({item.text: item for item in problems}.values())[:_NUM_HELD_OUT]
