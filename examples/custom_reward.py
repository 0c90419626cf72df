r"""Add your own reward to the reward of a task: correct answers, the shorter the better.

    python -m areal_rloo.launcher.local --config quickstart.yaml learner.num_train_steps=20 \
        'data.train.rewards=[{task: arithmetic}, {function: examples/custom_reward.py:brevity, weight: 0.3}]'

The reward is a weighted sum of parts. metrics.jsonl, the report and every trajectory show each part
(`areal-rloo inspect runs/latest`). A function runs in a separate process that can be killed. If the function
hangs, raises or returns no number, only the sample of this call is dropped, with the reason.
"""

from typing import Any


def brevity(completion: str, completion_ids: list[int], finish_reason: str, answer: str) -> float:
    """Return almost 1 for a short completion with an answer, less for more tokens, and 0 from 96 tokens on.

    Arguments are passed by name: prompt, completion, turns, prompt_ids, completion_ids, finish_reason, answer, purpose,
    source, item, and every field of the item's row.
    """
    if finish_reason != "stop" or "####" not in completion or not answer:
        return 0.0  # no bonus without an answer
    return max(0.0, 1 - len(completion_ids) / 96)


def steps(turns: list[str], **fields: Any) -> dict[str, Any]:
    """Return a reward for each turn instead of a single reward; needs algorithm.returns=token.

    `token_rewards`, with a value for each of `completion_ids`, work alike. `reward` defaults to their sum.
    """
    return {"turn_rewards": [0.1 * turn.count("=") for turn in turns]}


async def judged(completion: str) -> float:
    """Wait for a network: async functions run concurrently, up to `rollout.num_async_rewards` calls."""
    return float("####" in completion)
