"""The task `demonstrations`: completions to imitate, for `areal-rloo sft`. A row has one of three forms:

    {"prompt": "...", "completion": "..."}       both a text, or messages; the completion is learned
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    a row of `areal-rloo generate`               the token ids are learned, without another tokenization

Of `messages`, every message of the assistant is learned. `least_reward` keeps the samples of `generate` with at least
this reward: rejection sampling (arXiv:2308.01825). In an RL run, the reward is 1 for exactly the first completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Message, Split
from areal_rloo.tasks.rows import Row, RowTask, messages_of, prompt_of
from areal_rloo.trajectory import MOST_REWARD

_Prompt = str | tuple[Message, ...]
_SAMPLE = ("prompt_token_ids", "token_ids")


class DemonstrationsTask(RowTask):
    """The task."""

    defaults: ClassVar = {"least_reward": -MOST_REWARD}

    def items(self, split: Split) -> Sequence[Item]:
        kept = [(where, row) for where, row in self._rows(split) if self._is_kept(row, where)]
        if not kept:
            least = self.parameters["least_reward"]
            raise DataError(f"{self._source.path or self._source.hub}: no row has a reward of at least {least:g}")
        return [self.item(row, where) for where, row in kept]

    def item(self, row: Row, where: str) -> Item:
        if is_sample(row):
            return Item(str(row.get("prompt") or "(tokens)"), str(row.get("completion", "")), fields=row)
        prompt, turns = _split(row, where)
        return Item(prompt, turns[0].content, fields=row)

    def reward(self, completion: str, item: Item) -> float:
        return float(completion.strip() == item.answer.strip())

    def turns(self, item: Item) -> Sequence[Message]:
        return _split(item.fields, "item")[1]

    def _is_kept(self, row: Row, where: str) -> bool:
        """Leave out failed samples, and those with a low reward."""
        if not is_sample(row):
            return True
        reward = row.get("reward")
        if reward is not None and not isinstance(reward, int | float):
            raise DataError(f"{where}: expected a number in the field 'reward', got {type(reward).__name__}")
        return reward is not None and reward >= self.parameters["least_reward"]


def is_sample(row: Row) -> bool:
    """Return True for a row of `areal-rloo generate`."""
    return all(isinstance(row.get(field), list) for field in _SAMPLE)


def _split(row: Row, where: str) -> tuple[_Prompt, tuple[Message, ...]]:
    """Split a row into a prompt and the messages after the prompt; the first and the last are of the assistant.

    Raises:
        DataError: a field is missing or wrong; names the place and the field.
    """
    prompt: _Prompt
    if "messages" in row and "completion" not in row:
        messages = messages_of(row, "messages", where)
        roles = [message.role for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        prompt, turns, field = messages[:first], messages[first:], "messages"
        if not prompt:
            raise DataError(f"{where}: expected a message before the assistant's in the field 'messages', got none")
    else:
        if "completion" not in row:
            fields = ", ".join(map(str, row))
            raise DataError(f"{where}: expected the fields 'prompt' and 'completion', or 'messages', got {fields}")
        prompt, field = prompt_of(row, where), "completion"
        if isinstance(row[field], list):
            turns = messages_of(row, field, where)
        else:
            turns = (Message("assistant", row[field] if isinstance(row[field], str) else ""),)
    followed = [one.role == two.role == "assistant" for one, two in pairwise(turns)]
    if not turns or turns[0].role != "assistant" or turns[-1].role != "assistant" or any(followed):
        raise DataError(
            f"{where}: expected messages of the assistant in the field '{field}', the last one too, each before "
            f"another role; got {', '.join(turn.role for turn in turns) or 'none'}"
        )
    if not all(turn.content or turn.tool_calls for turn in turns if turn.role == "assistant"):
        raise DataError(f"{where}: expected a text of the assistant in the field '{field}', got an empty one")
    return prompt, turns
