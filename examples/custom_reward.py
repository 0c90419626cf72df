"""A reward of your own beside the task's: right answers, and the shorter the better.

    python -m areal_rloo.launcher.local --config quickstart.yaml learner.num_train_steps=20 \\
        'data.train.rewards=[{task: arithmetic}, {function: examples/custom_reward.py:brevity, weight: 0.3}]'

The reward is the weighted sum of its parts; each part is in metrics.jsonl, in the report and beside every trajectory
(`python -m areal_rloo.inspect runs/latest`). A function runs in a process of its own that can be killed: if it hangs,
raises or gives no number, its sample is dropped with the reason, and no other.
"""

from typing import Any


def brevity(completion: str, completion_ids: list[int], finish_reason: str, answer: str) -> float:
    """1 for an empty completion, 0 for one of 96 tokens; nothing for one that was cut.

    The arguments are found by their names: prompt, completion, turns, prompt_ids, completion_ids, finish_reason,
    answer, purpose, source, item, and every field of the item's row.
    """
    if finish_reason != "stop" or "####" not in completion or not answer:
        return 0.0  # an answer that is not there is not short
    return max(0.0, 1 - len(completion_ids) / 96)


def steps(turns: list[str], **fields: Any) -> dict[str, Any]:
    """A reward for each turn instead of one for all; it needs algorithm.returns=token.

    `token_rewards`, one for each of `completion_ids`, work alike. What `reward` leaves out is the sum of them.
    """
    return {"turn_rewards": [0.1 * turn.count("=") for turn in turns]}


async def judged(completion: str) -> float:
    """An async function may wait for a network; `rollout.num_async_rewards` of them are under way at a time."""
    return float("####" in completion)
