"""What a reward is asked, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_rloo.trajectory import FinishReason, Item

Purpose = Literal["train", "eval"]

FailureReason = Literal["reward_timeout", "reward_crash", "reward_error", "reward_not_finite", "reward_wrong_type"]
"""Why there is no reward: the label under which its sample is dropped."""


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to score.

    Attributes:
        purpose: which split's sources are meant.
        item: what the prompt was made of; `item.source` labels the source whose rewards count.
        completion: the text of the policy's last turn, special tokens left out.
        turns: the texts of all its turns; one but in an episode of several.
        prompt_ids: token ids of the prompt.
        completion_ids: token ids after the prompt, of all turns and what others said between them.
        finish_reason: the engine's word on how it ended.
    """

    purpose: Purpose
    item: Item
    completion: str
    turns: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish_reason: FinishReason


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of a reward says of a completion; the fields are those of `Scored`."""

    reward: float
    token_rewards: tuple[float, ...] | None = None
    turn_rewards: tuple[float, ...] | None = None
    answer: str | None = None


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What a completion is worth.

    Attributes:
        reward: the weighted sum of its parts.
        parts: each part as it was, before its weight, by label.
        token_rewards: the share of the reward that each of `completion_ids` earned; None where there is none.
        turn_rewards: the share of the reward that each of `turns` earned; None where there is none.
        answer: the final answer, for majority votes; None where the task knows of none.
    """

    reward: float
    parts: dict[str, float]
    token_rewards: tuple[float, ...] | None = None
    turn_rewards: tuple[float, ...] | None = None
    answer: str | None = None


class WorkStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of what scores, since the start: processes that had to be replaced, and seconds spent scoring, summed over what
    ran at a time."""

    restarts: int = 0
    busy_s: float = 0.0
