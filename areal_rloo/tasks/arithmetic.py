"""Sums of a few one-digit numbers, written out step by step in GSM8K's answer format.

    3+5+7=?     ─►     3+5=8
                       8+7=15
                       #### 15

Items are made on access from (seed, index). Which split a problem belongs to is decided by a hash of its text, so no
problem can be in two splits, whatever the seeds. Three to ten numbers, mostly few, give completions a long tail.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Literal

from areal_rloo.config import ConfiguredSource
from areal_rloo.rewards.answers import answer_key, answer_reward
from areal_rloo.tasks.base import Item, Split, Task
from areal_rloo.tasks.lazy import LazyItems
from areal_rloo.tasks.parameters import check_parameters, refuse_files

_COUNTS = (3, 4, 5, 6, 8, 9)
_NUM_TRAIN = 20_000
_NUM_HELD_OUT = 2_000

Part = Literal["train", "eval", "validation"]


def part_of(prompt: str) -> Part:
    """The split a problem belongs to: 80 % train, 10 % held out, 10 % for the warm start's stopping rule."""
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
            return _problems("train", self._seed, _NUM_TRAIN)
        # One held-out set for every seed, so that runs can be compared.
        return _distinct(_problems("eval", 0, 2 * _NUM_HELD_OUT), _NUM_HELD_OUT)

    def validation_items(self) -> Sequence[Item]:
        """Items of neither split."""
        return _distinct(_problems("validation", 0, 2 * _NUM_HELD_OUT), _NUM_HELD_OUT)

    def reward(self, completion: str, item: Item) -> float:
        return answer_reward(completion, item.answer)

    def final_answer(self, completion: str) -> str | None:
        return answer_key(completion)

    def demonstration(self, item: Item) -> str:
        return demonstration(item, random.Random(0), error_rate=0)


def demonstration(item: Item, rng: random.Random, *, error_rate: float) -> str:
    """The steps and the answer; each step is wrong with probability `error_rate`, and later ones go on from it."""
    first, *others = (int(number) for number in item.text.partition("=")[0].split("+"))
    lines, total = [], first
    for number in others:
        result = total + number
        if rng.random() < error_rate:
            result = max(1, result + rng.choice((-2, -1, 1, 2)))
        lines.append(f"{total}+{number}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"])


def _problems(part: Part, seed: int, num: int) -> Sequence[Item]:
    """Problems of one part, each a function of (seed, index)."""
    return LazyItems(num, lambda index: _problem(part, seed, index))


def _problem(part: Part, seed: int, index: int) -> Item:
    rng = random.Random(f"{part}/{seed}/{index}")
    while True:
        numbers = rng.sample(range(1, 10), rng.choice(_COUNTS))
        prompt = "+".join(map(str, numbers)) + "=?\n"
        if part_of(prompt) == part:
            return Item(prompt, f"#### {sum(numbers)}")


def _distinct(problems: Sequence[Item], num: int) -> Sequence[Item]:
    return list({item.text: item for item in problems}.values())[:num]
