r"""Train an agent without changes: the agent uses the `openai` client, and does not know about the training.

    python -m areal_rloo.launcher.local --config quickstart.yaml rollout.episode.type=agent \
        rollout.episode.agent=examples/openai_agent.py:solve learner.num_train_steps=20

Needs `pip install openai`, and minutes on a CPU. The run makes 8 samples of each problem. Every sample is a call of
`solve` with a separate API key; many calls run concurrently. The policy is trained on every answer of the endpoint to
this key, and the return value of `solve` is the reward of the sample.

To run the same agent against any other endpoint:

    print(solve(base_url="https://...", api_key="...", model="...", prompt="3+5+7=?\n", answer="#### 15"))
"""

import re

import openai

# Shared by all samples, because making a client takes longer than a turn of the tiny model. The client is thread-safe.
HTTP = openai.DefaultHttpxClient()


def solve(base_url: str, api_key: str, model: str, prompt: str, answer: str) -> float:
    """Add the numbers of the prompt.

    Arguments are passed by name. `prompt`, `answer` and every field of the row come from the item; `base_url`,
    `api_key` and `model` are for an OpenAI client.

    Returns:
        The reward. If None, the rewards of the item's source score the last turn.
    """
    client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    # The tiny model has no chat template, so the prompt is exactly the user message: "3+5+7=?\n".
    messages = [{"role": "user", "content": prompt}]
    # The endpoint always uses the temperature of the run, because training must know the sampling distribution.
    completion = client.chat.completions.create(model=model, messages=messages)
    # For more turns, append the answer and a message of a tool or a user to `messages`, and call again. If an agent
    # only appends, all turns form a single trajectory, and no token is tokenized twice.
    text = completion.choices[0].message.content or ""
    return float(final_number(text) == final_number(answer))


def final_number(text: str) -> int | None:
    """Return the number behind the last `####`, or None."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return int(found[-1]) if found else None
