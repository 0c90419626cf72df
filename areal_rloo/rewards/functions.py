"""A reward function of the user: gets the values that its parameters name.

    def reward(completion, answer, difficulty): ...        # `difficulty` is a field of the item's row
    async def reward(prompt, completion, **rest): ...      # `rest` gets all other values

Values are passed by name: `prompt` (a text, or messages as {"role", "content"}), `completion` (the last turn), `turns`,
`prompt_ids`, `completion_ids`, `finish_reason`, `answer`, `purpose`, `source`, `item`, and each field of the item's row
with another name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from areal_rloo.config import import_function
from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.request import Returns, RewardRequest, Worth, read_worth


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for an async function, and for an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def described_request(request: RewardRequest) -> dict[str, Any]:
    """Return the request as plain values by their standard names, without `item`."""
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
    """Calls a reward function, in the process that runs the function."""

    def __init__(self, key: str, path: str, *, returns: Returns) -> None:
        """Import the function at `path`, the value of the config's `key`.

        Raises:
            ConfigError: the function cannot be imported, is none, or the parameters cannot be read.
        """
        self._function = import_function(key, path)
        self._name = path.rpartition(":")[2]
        self._returns = returns
        self.is_async = is_async(self._function)
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except ValueError as error:
            detail = f"{key}: the parameters of {path} cannot be read: {error}; wrap it in a function"
            raise ConfigError(detail) from error
        kinds = inspect.Parameter
        self._by_position = [p for p in parameters if p.kind is kinds.POSITIONAL_ONLY]
        self._by_name = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        self._takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def score(self, request: RewardRequest) -> Worth:
        """Call the function.

        Raises:
            RewardError: no value has the name of a parameter, or the returned value is no reward.
        """
        return read_worth(self._call(request), request, returns=self._returns)

    async def score_async(self, request: RewardRequest) -> Worth:
        """Call an async function; raises like `score`."""
        return read_worth(await self._call(request), request, returns=self._returns)

    def unfilled(self, request: RewardRequest) -> str | None:
        """Name a parameter without a value in the request, and the known names; None if all have a value."""
        standard, fields = _values(request)
        for parameter in (*self._by_position, *self._by_name):
            if parameter.default is parameter.empty and parameter.name not in standard | fields:
                return (
                    f"{self._name} has the parameter '{parameter.name}', which nothing fills; rename it, or give it a "
                    f"default; known names: {', '.join(standard)}, and of the item's row "
                    f"{', '.join(fields) or 'no other field'}"
                )
        return None

    def _call(self, request: RewardRequest) -> Any:
        if (unfilled := self.unfilled(request)) is not None:
            raise RewardError("reward_error", unfilled)
        standard, fields = _values(request)
        known = standard | fields
        positional = {p.name: known.get(p.name, p.default) for p in self._by_position}
        wanted = known.keys() - positional if self._takes_all else {p.name for p in self._by_name}
        return self._function(*positional.values(), **{name: known[name] for name in known if name in wanted})


def _values(request: RewardRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the standard values, and those of other fields of the item's row, by name."""
    standard = {**described_request(request), "item": request.item}
    if not request.item.answer and "answer" not in request.item.fields:
        del standard["answer"]  # compared with an empty answer, every completion could look right
    return standard, {name: value for name, value in request.item.fields.items() if name not in standard}
