"""Simple word problems with irrelevant details (SVAMP, arXiv:2103.07191), answered in GSM8K's format.

From a local file with the fields `Body`, `Question` and `Answer`, a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_rloo.config import SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.rewards.answers import answer_reward, extract_answer
from areal_rloo.tasks.base import Item, Split
from areal_rloo.tasks.files import Row, read_rows, text_field
from areal_rloo.tasks.gsm8k import INSTRUCTION


class SvampTask:
    """The task; `source.path` names the file of the split that is asked for."""

    def __init__(self, source: SourceConfig) -> None:
        if source.path is None:
            raise DataError("data: the task svamp needs a local file; set data.train.path (and data.eval.path)")
        self._path, self._fields = source.path, source.fields

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, where) for where, row in read_rows(self._path, self._fields)]

    def reward(self, completion_text: str, answer: str) -> float:
        return answer_reward(completion_text, answer)


def _item(row: Row, where: str) -> Item:
    body, question = text_field(row, "Body", where).strip(), text_field(row, "Question", where).strip()
    answer = f"#### {row.get('Answer')}"
    if extract_answer(answer) is None:
        raise DataError(f"{where}: expected a number in the field 'Answer', got {row.get('Answer')!r}")
    return Item(f"{body}{'' if body.endswith('.') else '.'} {question}{INSTRUCTION}", answer)
