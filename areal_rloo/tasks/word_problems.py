"""Word problems with a number as answer, from a local file or the hub.

- GSM8K (arXiv:2110.14168): fields `question` and `answer`; the answer ends in `#### N`, or is a number.
- SVAMP (arXiv:2103.07191), problems with irrelevant details: fields `Body`, `Question` and `Answer`, a number.
"""

from __future__ import annotations

from typing import ClassVar

from areal_rloo.errors import DataError
from areal_rloo.tasks.answers import answer_key, answer_reward, check_gold, extract_answer, gold_answer
from areal_rloo.tasks.base import Item
from areal_rloo.tasks.rows import Row, RowTask, text_field

_INSTRUCTION = "\nThink step by step, and end with the answer as a number on a last line of its own: #### number"


class _WordProblems(RowTask):
    """Parameter `last_number_fallback`: without the mark `####`, take the last number of a completion."""

    defaults: ClassVar = {"last_number_fallback": False}

    def reward(self, completion: str, item: Item) -> float:
        return answer_reward(completion, item.answer, fallback=self.parameters["last_number_fallback"])

    def check_answer(self, item: Item) -> None:
        check_gold(item)

    def final_answer(self, completion: str) -> str | None:
        return answer_key(completion, fallback=self.parameters["last_number_fallback"])


class Gsm8kTask(_WordProblems):
    """Grade School Math."""

    hub = "openai/gsm8k:main"

    def item(self, row: Row, where: str) -> Item:
        question, number = text_field(row, "question", where), row.get("answer")
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        answer = str(number) if is_number else text_field(row, "answer", where)
        if gold_answer(answer) is None:
            expected = "expected an 'answer' ending in '#### number', or a number alone"
            raise DataError(f"{where}: {expected}, got {answer[-40:]!r}")
        shown = answer if extract_answer(answer) is not None else f"#### {answer}"  # a demonstration has the mark
        return Item(question + _INSTRUCTION, shown, fields=row)


class SvampTask(_WordProblems):
    """Single-step problems with irrelevant details, answered in GSM8K's format."""

    hub = "ChilleD/SVAMP"

    def item(self, row: Row, where: str) -> Item:
        body, question = text_field(row, "Body", where).strip(), text_field(row, "Question", where).strip()
        answer = f"#### {row.get('Answer')}"
        if extract_answer(answer) is None:
            raise DataError(f"{where}: expected a number in the field 'Answer', got {row.get('Answer')!r}")
        return Item(f"{body}{'' if body.endswith('.') else '.'} {question}{_INSTRUCTION}", answer, fields=row)
