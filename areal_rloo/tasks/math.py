r"""Competition mathematics in the format of MATH and MATH-500: a problem, and an answer in a box (arXiv:2103.03874).

From a local file with the fields `problem` and `answer`, or `problem` and a `solution` that ends in `\boxed{...}`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Split
from areal_rloo.tasks.files import read_rows

_INSTRUCTION = "\nThink step by step, and put the final answer in \\boxed{}."


class MathTask:
    """The task; `path` names the file of the split that is asked for."""

    def __init__(self, path: str | None) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise DataError("data: the task math needs math-verify; install the extra: pip install 'areal-rloo[math]'")
        if path is None:
            raise DataError("data: the task math needs a local file; set data.train.path (and data.eval.path)")
        self._path = path

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, f"{self._path}: row {n}") for n, row in enumerate(read_rows(self._path), start=1)]

    def reward(self, completion_text: str, answer: str) -> float:
        from areal_rloo.rewards.math_answers import math_reward  # noqa: PLC0415 - sympy takes a second to import

        return math_reward(completion_text, answer)


def _item(row: dict[str, Any], where: str) -> Item:
    from areal_rloo.rewards.math_answers import extract_boxed  # noqa: PLC0415 - as above

    if not isinstance(row.get("problem"), str):
        raise DataError(f"{where}: expected a text field 'problem', got the fields {', '.join(map(str, row))}")
    answer = row.get("answer")
    if answer is None and isinstance(row.get("solution"), str):
        answer = extract_boxed(row["solution"])
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(rf"{where}: expected a text field 'answer', or a 'solution' with a \boxed{{}} answer in it")
    return Item(row["problem"] + _INSTRUCTION, answer)
