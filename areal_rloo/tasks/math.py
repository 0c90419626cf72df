r"""Competition mathematics in the format of MATH and MATH-500: a problem, and an answer in a box (arXiv:2103.03874).

From a local file with the fields `problem` and `answer`, or `problem` and a `solution` that ends in `\boxed{...}`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from areal_rloo.config import SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Split
from areal_rloo.tasks.files import Row, read_rows, text_field

_INSTRUCTION = "\nThink step by step, and put the final answer in \\boxed{}."


class MathTask:
    """The task; `source.path` names the file of the split that is asked for."""

    def __init__(self, source: SourceConfig) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise DataError("data: the task math needs math-verify; install the extra: pip install 'areal-rloo[math]'")
        if source.path is None:
            raise DataError("data: the task math needs a local file; set data.train.path (and data.eval.path)")
        self._path, self._fields = source.path, source.fields

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, where) for where, row in read_rows(self._path, self._fields)]

    def reward(self, completion_text: str, answer: str) -> float:
        from areal_rloo.rewards.math_answers import math_reward  # noqa: PLC0415 - sympy takes a second to import

        return math_reward(completion_text, answer)


def _item(row: Row, where: str) -> Item:
    from areal_rloo.rewards.math_answers import extract_boxed  # noqa: PLC0415 - as above

    problem = text_field(row, "problem", where)
    answer = row.get("answer")
    if answer is None and isinstance(row.get("solution"), str):
        answer = extract_boxed(row["solution"])
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(rf"{where}: expected a text field 'answer', or a 'solution' with a \boxed{{}} answer in it")
    return Item(problem + _INSTRUCTION, answer)
