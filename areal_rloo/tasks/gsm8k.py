"""Grade School Math: word problems whose gold answer ends in `#### N` (arXiv:2110.14168).

From a local file, or from the hub where the `datasets` library is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError
from areal_rloo.rewards.answers import answer_key, answer_reward, extract_answer
from areal_rloo.tasks.base import Item, Split, Task
from areal_rloo.tasks.files import Row, text_field
from areal_rloo.tasks.parameters import check_parameters
from areal_rloo.tasks.rows import rows_of

INSTRUCTION = "\nThink step by step, and end with the answer as a number on a last line of its own: #### number"


class Gsm8kTask(Task):
    """The task. Parameter `last_number_fallback`: a completion without the mark is taken at its last number."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        del seed
        self._source = source
        self._fallback = check_parameters(source, {"last_number_fallback": False})["last_number_fallback"]

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, where) for where, row in rows_of(self._source, split, hub="openai/gsm8k:main")]

    def reward(self, completion: str, item: Item) -> float:
        return answer_reward(completion, item.answer, fallback=self._fallback)

    def final_answer(self, completion: str) -> str | None:
        return answer_key(completion, fallback=self._fallback)


def _item(row: Row, where: str) -> Item:
    question, answer = text_field(row, "question", where), text_field(row, "answer", where)
    if extract_answer(answer) is None:
        raise DataError(f"{where}: expected an 'answer' ending in '#### number', got {answer[-40:]!r}")
    return Item(question + INSTRUCTION, answer, fields=row)
