"""The reward functions of TRL and ms-swift: TRL's `accuracy_reward` is the reward of our task math."""

from __future__ import annotations

import re
from typing import Any

from areal_rloo.migrate.rules import Given, Options, Rule, UnreadableError

BY_HAND = (
    "data.train.rewards=[{function: FILE.py:NAME}], with {task: math} in the list for accuracy_reward: a function here "
    "gets one completion, not a batch; see docs/rewards.md"
)


def names(given: Given) -> list[str]:
    """List the names of the functions, without their modules."""
    value = given.get("reward_funcs", [])
    listed = value if isinstance(value, list) else re.split(r"[\s,]+", str(value).strip("[]() "))
    return [str(name).strip("'\"").rpartition(".")[2] for name in listed]


def overlong(value: Any, given: Given) -> Options:
    """ms-swift subtracts for long completions only with the reward `soft_overlong`."""
    return {"algorithm.rewards.overlong_tokens": value} if "soft_overlong" in names(given) else {}


def _of_task(value: Any, given: Given) -> Options:
    if names(given) != ["accuracy_reward"]:
        raise UnreadableError(BY_HAND)
    return {}  # the source has the task


REWARDS = Rule(_of_task, "the reward of the task math", by_name=True)
