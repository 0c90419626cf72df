"""Generated puzzles with their own verifiers: any dataset of reasoning-gym by name (arXiv:2505.24760).

Parameters: `dataset`, its name; `size`, how many items (10,000; 500 for evaluation); `seed`; and those of the dataset
itself. Without a seed the train split draws with the run's, and evaluation with one that no run has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Split, Task
from areal_rloo.tasks.lazy import LazyItems
from areal_rloo.tasks.parameters import refuse_files

_SIZES: Mapping[Split, int] = {"train": 10_000, "eval": 500}
_EVAL_SEED = 2**31 - 1
_INSTRUCTION = "\nThink step by step, and give the final answer alone inside <answer> and </answer>."


class ReasoningGymTask(Task):
    """The task; items are generated on access, from (seed, index)."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        refuse_files(source)
        self._label = source.label
        self._seed = seed
        self._parameters = dict(source.parameters)
        self._name = self._parameters.pop("dataset", None)
        if not isinstance(self._name, str):
            raise DataError(
                f"data: {self._label}: parameters.dataset: expected the name of a reasoning-gym dataset, for example "
                f"leg_counting, got {self._name!r}"
            )
        self._datasets: dict[Split, Any] = {}
        self._dataset("train")  # so that a wrong parameter is told before anything starts

    def items(self, split: Split) -> Sequence[Item]:
        dataset = self._dataset(split)
        return LazyItems(len(dataset), lambda index: _item(dataset, split, index))

    def reward(self, completion: str, item: Item) -> float:
        from reasoning_gym.utils import extract_answer  # noqa: PLC0415 - an extra, imported where it is used

        dataset = self._dataset(item.fields["split"])
        return float(dataset.score_answer(extract_answer(completion), dataset[item.fields["index"]]))

    def final_answer(self, completion: str) -> str | None:
        from reasoning_gym.utils import extract_answer  # noqa: PLC0415 - as above

        answer = extract_answer(completion)
        return None if answer is None else str(answer).strip()

    def demonstration(self, item: Item) -> str:
        return f"<answer>{item.answer}</answer>"

    def _dataset(self, split: Split) -> Any:
        if split not in self._datasets:
            self._datasets[split] = self._make(split)
        return self._datasets[split]

    def _make(self, split: Split) -> Any:
        try:
            import reasoning_gym  # noqa: PLC0415 - as above
        except ImportError as error:
            raise DataError(
                f"data: {self._label}: the task reasoning_gym needs its library; install the extra: "
                "pip install 'areal-rloo[rg]'"
            ) from error
        defaults = {"size": _SIZES[split], "seed": self._seed if split == "train" else _EVAL_SEED}
        try:
            return reasoning_gym.create_dataset(self._name, **(defaults | self._parameters))
        except (ValueError, TypeError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"data: {self._label}: parameters: reasoning-gym refuses {self._name}: {reason}") from error


def _item(dataset: Any, split: Split, index: int) -> Item:
    entry = dataset[index]
    # The verifier wants the whole entry, which is generated again where it is needed: not all of it is JSON.
    fields = {"split": split, "index": index}
    return Item(entry["question"] + _INSTRUCTION, str(entry["answer"]), fields=fields)
