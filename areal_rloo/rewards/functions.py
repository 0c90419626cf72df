"""A reward function of the user's, called with what its parameters name.

    def reward(completion, answer, difficulty): ...        # `difficulty` is a field of the item's row
    async def reward(prompt, completion, **rest): ...      # `rest` is everything else there is

Parameters are passed by name. What there is: `prompt` (a text, or messages as {"role", "content"}), `completion` (the
last turn), `turns`, `prompt_ids`, `completion_ids`, `finish_reason`, `answer`, `purpose`, `source`, `item`, and each
field of the item's row that has none of these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_rloo.config import import_function
from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.request import RewardRequest, Worth
from areal_rloo.rewards.values import Returns, read_worth

_STANDARD = (
    "prompt",
    "completion",
    "turns",
    "prompt_ids",
    "completion_ids",
    "finish_reason",
    "answer",
    "purpose",
    "source",
    "item",
)


def is_async(function: Callable[..., Any]) -> bool:
    """True for a function that is awaited, and for an object whose call is."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def described_request(request: RewardRequest) -> dict[str, Any]:
    """The request as plain values, by their standard names, but for the item itself."""
    prompt = request.item.prompt
    return {
        "prompt": prompt if isinstance(prompt, str) else request.item.plain_messages,
        "completion": request.completion,
        "turns": list(request.turns),
        "prompt_ids": list(request.prompt_ids),
        "completion_ids": list(request.completion_ids),
        "finish_reason": request.finish_reason,
        "answer": request.item.answer,
        "purpose": request.purpose,
        "source": request.item.source,
    }


class FunctionReward:
    """A reward function, in the process that runs it."""

    def __init__(self, key: str, path: str, *, returns: Returns) -> None:
        """
        Args:
            key: where the path stands in the config, for errors.
            path: module:function or path/to/file.py:function.
            returns: `algorithm.returns`.

        Raises:
            ConfigError: it cannot be imported, or does not say what its parameters are.
        """
        self._function = import_function(key, path)
        self._name = path.rpartition(":")[2]
        self._returns = returns
        self.is_async = is_async(self._function)
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except ValueError as error:
            raise ConfigError(
                f"{key}: the parameters of {path} cannot be read: {error}; wrap it in a function"
            ) from error
        kinds = inspect.Parameter
        self._by_position = [p for p in parameters if p.kind is kinds.POSITIONAL_ONLY]
        self._by_name = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        self._takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def score(self, request: RewardRequest) -> Worth:
        """Call it.

        Raises:
            RewardError: a parameter has nothing to be filled with, or what it gave is no reward.
        """
        return read_worth(self._call(request), request, returns=self._returns)

    async def score_async(self, request: RewardRequest) -> Worth:
        """`score`, where the function is async."""
        return read_worth(await self._call(request), request, returns=self._returns)

    def _call(self, request: RewardRequest) -> Any:
        known = {**request.item.fields, **described_request(request), "item": request.item}
        if not request.item.answer and "answer" not in request.item.fields:
            del known["answer"]  # a reward that compares with nothing would find everything right
        positional = [self._filled(parameter, known) for parameter in self._by_position]
        if self._takes_all:
            taken = {parameter.name for parameter in self._by_position}
            named = {name: value for name, value in known.items() if name not in taken}
        else:
            named = {p.name: known[p.name] for p in self._by_name if p.name in known}
        for parameter in self._by_name:
            if parameter.name not in named:
                self._filled(parameter, known)
        return self._function(*positional, **named)

    def _filled(self, parameter: inspect.Parameter, known: Mapping[str, Any]) -> Any:
        """What a parameter is filled with; its default where nothing has its name."""
        if parameter.name in known:
            return known[parameter.name]
        if parameter.default is not inspect.Parameter.empty:
            return parameter.default
        fields = ", ".join(name for name in known if name not in _STANDARD)
        raise RewardError(
            "reward_error",
            f"{self._name} has the parameter '{parameter.name}', which nothing fills; rename it, or give it a default; "
            f"there are {', '.join(_STANDARD)}, and of the item's row {fields or 'no other field'}",
        )
