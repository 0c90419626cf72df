"""Completions to score."""

from typing import Any

from areal_rloo.rewards.request import RewardRequest
from areal_rloo.trajectory import Item


def reward_request(completion: str, item: Item, **changes: Any) -> RewardRequest:
    """Make the request of a training sample with a single turn; `changes` replaces fields."""
    fields: dict[str, Any] = {
        "purpose": "train",
        "item": item,
        "completion": completion,
        "turns": (completion,),
        "prompt_ids": (1,),
        "completion_ids": (2,),
        "finish_reason": "stop",
    }
    return RewardRequest(**fields | changes)
