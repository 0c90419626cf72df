"""The nouns of scoring: a completion to score, the worth of one reward part, and the reward of a completion.

Input of `read_worth`: any value that a user's function, a task, a service or a model returned. Output: a `Worth` that
has been checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from areal_rloo.errors import RewardError
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import MOST_REWARD, FinishReason, Item, Purpose, is_reward

Returns = Literal["trajectory", "token"]
"""`algorithm.returns`: says if single tokens may have a reward."""

FailureReason = Literal[
    "reward_timeout",
    "reward_crash",
    "reward_error",
    "reward_out_of_range",
    "reward_wrong_type",
    "reward_unavailable",
]
"""Says why a completion has no reward: the label under which the sample is dropped."""

SourceKey = tuple[Purpose, str]
"""A split, and the label of a source in it."""

_KEYS = ("reward", "token_rewards", "turn_rewards")


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion to score."""

    purpose: Purpose  # the split of the source
    item: Item  # behind the prompt; `item.source` is the label of the source whose rewards are used
    completion: str  # text of the policy's last turn, without special tokens
    turns: tuple[str, ...]  # texts of all turns of the policy; more than one only in an episode of several turns
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # after the prompt: every turn, and the text that others wrote between turns
    finish_reason: FinishReason  # of the last turn


class Worth(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The value that one reward part gives to a completion; the fields are those of `Scored`."""

    reward: float
    token_rewards: tuple[float, ...] | None = None
    turn_rewards: tuple[float, ...] | None = None


class FinalAnswer(msgspec.Struct, frozen=True, tag=True):
    """The final answer of a completion, for majority votes; equal answers are equal texts. None: no answer."""

    text: str | None


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a completion."""

    reward: float  # the weighted sum of the parts
    parts: dict[str, float]  # the value of each part before the weight, by label
    token_rewards: tuple[float, ...] | None = None  # each of `completion_ids` earned this share; None: no part says so
    turn_rewards: tuple[float, ...] | None = None  # each of `turns` earned this share; None: no part says so
    answer: str | None = None  # the final answer, for majority votes; None if it was not asked for, or there is none


class WorkStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a runner since the start."""

    runner: str
    num_at_once: int  # rewards at a time, at most
    num_queued: int  # rewards that wait until they can start
    busy_s: float  # summed over rewards of the same time
    restarts: int = 0  # of its processes


class RewardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The completions now, and counts since the start."""

    metrics_prefix: ClassVar[str] = "reward_"

    waiting: Annotated[int, Metric("Completions waiting for their reward, or being scored")]
    num_at_once: Annotated[
        dict[str, int], Metric("Rewards of a runner at a time, at most (of a model: its batch_size)", label="runner")
    ]
    num_queued: Annotated[dict[str, int], Metric("Rewards that wait until a runner can start them", label="runner")]
    scored: Annotated[int, Metric("Completions this worker scored", kind="counter")]
    dropped: Annotated[dict[str, int], Metric("Completions dropped without a reward", kind="counter", label="reason")]
    restarts: Annotated[int, Metric("Reward processes this worker had to replace", kind="counter")]
    busy_s: Annotated[
        dict[str, float],
        Metric("Time of scoring, summed over rewards of the same time", "s", "counter", label="runner"),
    ]


def by_runner(each: Iterable[WorkStatistics]) -> dict[str, Any]:
    """Return the numbers of several runners by field."""
    runners = list(each)
    numbers = ("num_at_once", "num_queued", "busy_s")
    return {
        "restarts": sum(one.restarts for one in runners),
        **{name: {one.runner: getattr(one, name) for one in runners} for name in numbers},
    }


def read_worth(value: object, request: RewardRequest, *, returns: Returns) -> Worth:
    """Check a reward: a number, or a mapping {"reward": ..., "token_rewards": [...], "turn_rewards": [...]}.

    Without `reward`, the reward is the sum of the others. None counts as absent; other keys are ignored.

    Raises:
        RewardError: the value has another type, is not finite, does not have one number for each token or turn, or has
            token rewards although `algorithm.returns` does not allow them.
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
    key: str, given: Mapping[str, Any], expected: int, noun: str, returns: Returns
) -> tuple[float, ...] | None:
    if key not in given:
        return None
    if returns != "token":
        raise RewardError(
            "reward_wrong_type",
            f"{key}: rewards of tokens or turns need algorithm.returns=token, but this run has {returns}; leave {key} "
            "out, or set algorithm.returns",
        )
    values = given[key]
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise RewardError("reward_wrong_type", f"{key}: expected a list of numbers, got {type(values).__name__}")
    numbers = tuple(_number(f"{key}[{index}]", number) for index, number in enumerate(values))
    if len(numbers) != expected:
        raise RewardError(
            "reward_wrong_type", f"{key}: expected one number for each of the {expected} {noun}, got {len(numbers)}"
        )
    return numbers


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real) and not _is_numpy_bool(value):
        raise RewardError("reward_wrong_type", f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not is_reward(number):
        raise RewardError("reward_out_of_range", f"{name} is {number}, expected at most {MOST_REWARD:g} in size")
    return number


def _is_numpy_bool(value: object) -> bool:
    """Return True for numpy's bool, the only scalar of numpy that is no `Real`."""
    import numpy as np  # noqa: PLC0415 - only if the value is no number of Python

    return isinstance(value, np.bool_)
