r"""Competition mathematics in the format of MATH and MATH-500: a problem, and an answer in a box (arXiv:2103.03874).

From a local file with the fields `problem` and `answer`, or `problem` and a `solution` that ends in `\boxed{...}`; or
from the hub.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Split, Task
from areal_rloo.tasks.files import Row, text_field
from areal_rloo.tasks.parameters import check_parameters
from areal_rloo.tasks.rows import rows_of

_INSTRUCTION = "\nThink step by step, and put the final answer in \\boxed{}."


class MathTask(Task):
    """The task."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        del seed
        if importlib.util.find_spec("math_verify") is None:
            raise DataError("data: the task math needs math-verify; install the extra: pip install 'areal-rloo[math]'")
        check_parameters(source, {})
        self._source = source

    def items(self, split: Split) -> Sequence[Item]:
        hub = "DigitalLearningGmbH/MATH-lighteval" if split == "train" else "HuggingFaceH4/MATH-500"
        return [_item(row, where) for where, row in rows_of(self._source, split, hub=hub)]

    def reward(self, completion: str, item: Item) -> float:
        from areal_rloo.rewards.math_answers import math_reward  # noqa: PLC0415 - sympy takes a second to import

        return math_reward(completion, item.answer)

    def final_answer(self, completion: str) -> str | None:
        from areal_rloo.rewards.math_answers import answer_key  # noqa: PLC0415 - as above

        return answer_key(completion)

    def demonstration(self, item: Item) -> str:
        solution = item.fields.get("solution")
        return solution if isinstance(solution, str) else f"\\boxed{{{item.answer}}}"


def _item(row: Row, where: str) -> Item:
    problem = text_field(row, "problem", where)
    answer = row.get("answer")
    if answer is None and isinstance(row.get("solution"), str):
        from areal_rloo.rewards.math_answers import extract_boxed  # noqa: PLC0415 - as above

        answer = extract_boxed(row["solution"])
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(rf"{where}: expected a text field 'answer', or a 'solution' with a \boxed{{}} answer in it")
    return Item(problem + _INSTRUCTION, answer, fields=row)
