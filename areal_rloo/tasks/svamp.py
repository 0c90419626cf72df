"""Simple word problems with irrelevant details (SVAMP, arXiv:2103.07191), answered in GSM8K's format.

From a local file with the fields `Body`, `Question` and `Answer`, a number, or from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError
from areal_rloo.rewards.answers import answer_key, answer_reward, extract_answer
from areal_rloo.tasks.base import Item, Split, Task
from areal_rloo.tasks.files import Row, text_field
from areal_rloo.tasks.gsm8k import INSTRUCTION
from areal_rloo.tasks.parameters import check_parameters
from areal_rloo.tasks.rows import rows_of


class SvampTask(Task):
    """The task. Parameter `last_number_fallback`: a completion without the mark is taken at its last number."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        del seed
        self._source = source
        self._fallback = check_parameters(source, {"last_number_fallback": False})["last_number_fallback"]

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, where) for where, row in rows_of(self._source, split, hub="ChilleD/SVAMP")]

    def reward(self, completion: str, item: Item) -> float:
        return answer_reward(completion, item.answer, fallback=self._fallback)

    def final_answer(self, completion: str) -> str | None:
        return answer_key(completion, fallback=self._fallback)


def _item(row: Row, where: str) -> Item:
    body, question = text_field(row, "Body", where).strip(), text_field(row, "Question", where).strip()
    answer = f"#### {row.get('Answer')}"
    if extract_answer(answer) is None:
        raise DataError(f"{where}: expected a number in the field 'Answer', got {row.get('Answer')!r}")
    return Item(f"{body}{'' if body.endswith('.') else '.'} {question}{INSTRUCTION}", answer, fields=row)
