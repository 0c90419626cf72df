"""Simple word problems with irrelevant details (SVAMP, arXiv:2103.07191), answered in GSM8K's format.

From a local file with the fields `Body`, `Question` and `Answer`, a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_rloo.errors import DataError
from areal_rloo.rewards.answers import answer_reward, extract_answer
from areal_rloo.tasks.base import Item, Split
from areal_rloo.tasks.files import read_rows
from areal_rloo.tasks.gsm8k import INSTRUCTION


class SvampTask:
    """The task; `path` names the file of the split that is asked for."""

    def __init__(self, path: str | None) -> None:
        if path is None:
            raise DataError("data: the task svamp needs a local file; set data.train.path (and data.eval.path)")
        self._path = path

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, f"{self._path}: row {n}") for n, row in enumerate(read_rows(self._path), start=1)]

    def reward(self, completion_text: str, answer: str) -> float:
        return answer_reward(completion_text, answer)


def _item(row: dict[str, Any], where: str) -> Item:
    for field in ("Body", "Question"):
        if not isinstance(row.get(field), str):
            raise DataError(f"{where}: expected a text field '{field}', got the fields {', '.join(map(str, row))}")
    answer = f"#### {row.get('Answer')}"
    if extract_answer(answer) is None:
        raise DataError(f"{where}: expected a number in the field 'Answer', got {row.get('Answer')!r}")
    body = row["Body"].strip()
    return Item(f"{body}{'' if body.endswith('.') else '.'} {row['Question'].strip()}{INSTRUCTION}", answer)
