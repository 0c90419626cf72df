"""Grade School Math: word problems whose gold answer ends in `#### N` (arXiv:2110.14168).

From a local file, or from the hub where the `datasets` library is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from areal_rloo.config import SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.rewards.answers import answer_reward, extract_answer
from areal_rloo.tasks.base import Item, Split
from areal_rloo.tasks.files import Row, read_rows, text_field

_HUB_NAME = "openai/gsm8k"
INSTRUCTION = "\nThink step by step, and end with the answer as a number on a last line of its own: #### number"


class Gsm8kTask:
    """The task; `source.path` names the file of the split that is asked for, None the hub."""

    def __init__(self, source: SourceConfig) -> None:
        self._source = source

    def items(self, split: Split) -> Sequence[Item]:
        if self._source.path is not None:
            return [_item(row, where) for where, row in read_rows(self._source.path, self._source.fields)]
        rows = _from_hub("train" if split == "train" else "test", f"data.{split}.path")
        return [_item(row, f"{_HUB_NAME}: row {n}") for n, row in enumerate(rows, start=1)]

    def reward(self, completion_text: str, answer: str) -> float:
        return answer_reward(completion_text, answer)


def _item(row: Row, where: str) -> Item:
    question, answer = text_field(row, "question", where), text_field(row, "answer", where)
    if extract_answer(answer) is None:
        raise DataError(f"{where}: expected an 'answer' ending in '#### number', got {answer[-40:]!r}")
    return Item(question + INSTRUCTION, answer)


def _from_hub(hub_split: str, key: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets  # noqa: PLC0415 - an extra, imported where it is used
    except ImportError as error:
        raise DataError(
            f"{key}: null means the hub, which needs the `datasets` library; set {key} to a local file, or install the "
            "extra: pip install 'areal-rloo[data]'"
        ) from error
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(_HUB_NAME, "main", split=hub_split)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{key}: {_HUB_NAME} cannot be had from the hub ({reason}); set it to a local file") from error
    return rows
