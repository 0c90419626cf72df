"""Generated puzzles with their own verifiers: any dataset of reasoning-gym by name (arXiv:2505.24760).

Parameters: `dataset` (a name), `size` (number of items: 10,000; 500 for evaluation), `seed`, and the parameters of the
dataset. By default the train split uses the run's seed, and evaluation a seed outside the range of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import SourceError, install
from areal_rloo.tasks.base import Item, LazyItems, Split, Task, refuse_files

_SIZES: Mapping[Split, int] = {"train": 10_000, "eval": 500}
_EVAL_SEED = 2**31 - 1
_INSTRUCTION = "\nThink step by step, and give the final answer alone inside <answer> and </answer>."


class ReasoningGymTask(Task):
    """The task; items are generated on access, from (seed, index)."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        refuse_files(source)
        self._seed = seed
        self._parameters = dict(source.parameters)
        self._name = self._parameters.pop("dataset", None)
        if not isinstance(self._name, str):
            raise SourceError(
                "parameters.dataset: expected the name of a reasoning-gym dataset, for example leg_counting, got "
                f"{self._name!r}"
            )
        self._datasets: dict[Split, Any] = {}
        self._dataset("train")  # reports a wrong parameter before the run starts

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
        if split in self._datasets:
            return self._datasets[split]
        try:
            import reasoning_gym  # noqa: PLC0415 - as above
        except ImportError as error:
            words = f"task: reasoning_gym needs its library; install the extra: {install('rg')}"
            raise SourceError(words, absent=True) from error
        defaults = {"size": _SIZES[split], "seed": self._seed if split == "train" else _EVAL_SEED}
        try:
            dataset = reasoning_gym.create_dataset(self._name, **(defaults | self._parameters))
        except (ValueError, TypeError, AssertionError) as error:
            reason = " ".join(str(error).split())
            raise SourceError(f"parameters: reasoning-gym refuses {self._name}: {reason}") from error
        return self._datasets.setdefault(split, dataset)


def _item(dataset: Any, split: Split, index: int) -> Item:
    entry = dataset[index]
    # The verifier needs the whole entry, which is not always JSON, so the verifier generates the entry again.
    fields = {"split": split, "index": index}
    return Item(entry["question"] + _INSTRUCTION, str(entry["answer"]), fields=fields)
