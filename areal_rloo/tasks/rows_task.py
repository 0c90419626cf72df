"""Prompts of your own, one a row, scored by rewards of your own.

    {"prompt": "...", "answer": "..."}        or "prompt": [{"role": "user", "content": "..."}, ...]

`answer` may be absent; every field of the row reaches the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Message, Split, Task
from areal_rloo.tasks.files import Row
from areal_rloo.tasks.parameters import check_parameters
from areal_rloo.tasks.rows import rows_of


class RowsTask(Task):
    """The task; it has no reward of its own, so its source names some."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        del seed
        check_parameters(source, {})
        if not source.rewards or any(reward.task == source.task for reward in source.rewards):
            raise DataError(
                f"data: {source.label}: the task rows has no reward of its own; name one under rewards, for example "
                "rewards: [{function: my_rewards.py:score}]"
            )
        self._source = source

    def items(self, split: Split) -> Sequence[Item]:
        return [_item(row, where) for where, row in rows_of(self._source, split)]

    def reward(self, completion: str, item: Item) -> float:
        raise AssertionError("a source that asks for this is refused when the task is made")


def _item(row: Row, where: str) -> Item:
    prompt = row.get("prompt")
    answer = "" if row.get("answer") is None else row["answer"]
    if isinstance(prompt, list):
        try:
            messages = msgspec.convert(prompt, tuple[Message, ...])
        except msgspec.ValidationError as error:
            raise DataError(f"{where}: expected messages of role and content in the field 'prompt': {error}") from error
        if not messages or messages[-1].role == "assistant":
            raise DataError(f"{where}: expected a conversation that the policy can go on with in the field 'prompt'")
        return Item(messages, str(answer), fields=row)
    if not isinstance(prompt, str) or not prompt:
        got = type(prompt).__name__ if "prompt" in row else f"the fields {', '.join(map(str, row))}"
        got = "an empty one" if prompt == "" else got
        raise DataError(f"{where}: expected a text or messages in the field 'prompt', got {got}")
    return Item(prompt, str(answer), fields=row)
