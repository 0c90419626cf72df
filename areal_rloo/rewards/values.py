"""What a reward gave, read once: a number, or a mapping that also says what single tokens or turns earned.

Comes in: whatever a function of the user's or a service gave. Goes out: a `Worth` that can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Literal

from areal_rloo.errors import RewardError
from areal_rloo.rewards.request import RewardRequest, Worth

Returns = Literal["trajectory", "token"]
"""`algorithm.returns`: whether single tokens may have a reward."""

_KEYS = ("reward", "token_rewards", "turn_rewards")


def read_worth(value: object, request: RewardRequest, *, returns: Returns) -> Worth:
    """A reward as a number, or as {"reward": ..., "token_rewards": [...], "turn_rewards": [...]}.

    Without `reward` it is the sum of the others. A None counts as left out; other keys are the giver's own.

    Raises:
        RewardError: it is something else, is not finite, has not one number for each token or turn, or has them where
            the algorithm takes none.
    """
    if not isinstance(value, Mapping):
        return Worth(reward=_number("the reward", value))
    given: dict[str, Any] = {key: value[key] for key in _KEYS if value.get(key) is not None}
    if not given:
        raise RewardError(
            "reward_wrong_type",
            f"expected a number under 'reward', got the keys {', '.join(map(str, value)) or 'none'}",
        )
    tokens = _numbers("token_rewards", given, len(request.completion_ids), "completion ids", returns)
    turns = _numbers("turn_rewards", given, len(request.turns), "turns", returns)
    reward = given.get("reward", sum([*(tokens or ()), *(turns or ())]))
    return Worth(reward=_number("the reward", reward), token_rewards=tokens, turn_rewards=turns)


def _numbers(
    key: str, given: Mapping[str, Any], expected: int, of_what: str, returns: Returns
) -> tuple[float, ...] | None:
    if key not in given:
        return None
    if returns != "token":
        raise RewardError(
            "reward_wrong_type",
            f"{key}: rewards of tokens or turns need algorithm.returns=token, and it is {returns}; leave {key} out, or "
            "set it",
        )
    values = given[key]
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise RewardError("reward_wrong_type", f"{key}: expected a list of numbers, got {type(values).__name__}")
    numbers = tuple(_number(f"{key}[{index}]", number) for index, number in enumerate(values))
    if len(numbers) != expected:
        raise RewardError(
            "reward_wrong_type", f"{key}: expected one for each of the {expected} {of_what}, got {len(numbers)}"
        )
    return numbers


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real) and not _is_numpy_bool(value):
        raise RewardError("reward_wrong_type", f"{what}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError("reward_not_finite", f"{what} is {number}")
    return number


def _is_numpy_bool(value: object) -> bool:
    """The one scalar of numpy that is no `Real`."""
    import numpy as np  # noqa: PLC0415 - only where no number of Python's came

    return isinstance(value, np.bool_)
