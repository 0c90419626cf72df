r"""Define your own task: prompts, and rewards of completions.

    python -m areal_rloo.launcher.local --config quickstart.yaml learner.num_train_steps=20 \
        data.train.task=examples/custom_task.py:ShortSums data.train.parameters.num_items=500 \
        data.eval.task=examples/custom_task.py:ShortSums

Prompts in a file with a reward function need no class: use `task: rows`, `path` and `rewards`.
"""

import random
from collections.abc import Sequence

from areal_rloo.config import ConfiguredSource
from areal_rloo.tasks import Item, Split, Task
from areal_rloo.tasks.answers import answer_reward


class ShortSums(Task):
    """Sums of three or four numbers. Parameter `num_items`: number of prompts to draw."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        """Make the task: in the learner for the items, and in every reward process for the rewards."""
        self._num_items = int(source.parameters.get("num_items", 1000))
        self._seed = seed

    def items(self, split: Split) -> Sequence[Item]:
        """Return always the same items, so that a run can be resumed."""
        rng = random.Random(f"{split}/{self._seed}")
        sums = [rng.sample(range(1, 10), rng.choice((3, 4))) for _ in range(self._num_items)]
        # Even sums are for training and odd sums for evaluation, so no prompt is in both splits.
        mine = [numbers for numbers in sums if (sum(numbers) % 2 == 0) == (split == "train")]
        return [Item("+".join(map(str, n)) + "=?\n", f"#### {sum(n)}", fields={"num_numbers": len(n)}) for n in mine]

    def reward(self, completion: str, item: Item) -> float:
        """Score a completion; longer sums have higher rewards."""
        return answer_reward(completion, item.answer) * int(item.fields["num_numbers"]) / 4

    def demonstration(self, item: Item) -> str:
        """Return a correct completion for few-shot prompts: data.train.few_shot={num: 2}."""
        return item.answer
