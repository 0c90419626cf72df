"""An agent that is trained as it is: it knows the `openai` client, and nothing of the training.

    python -m areal_rloo.launcher.local --config quickstart.yaml rollout.episode.type=agent \\
        rollout.episode.agent=examples/openai_agent.py:solve learner.num_train_steps=20

It needs `pip install openai`, and minutes on a CPU. The run makes 8 samples of each problem; every sample is one call
of `solve`, many at once, each with a key of its own. Whatever `solve` asks the endpoint is what its policy is trained
on, turn by turn, and what `solve` gives back is the reward of all of it.

To run the same agent against any other endpoint:

    print(solve(base_url="https://...", api_key="...", model="...", prompt="3+5+7=?\\n", answer="#### 15"))
"""

import re

import openai

# One for all samples: to make one takes longer than the tiny model's turn. It may be used by many threads at once.
HTTP = openai.DefaultHttpxClient()


def solve(base_url: str, api_key: str, model: str, prompt: str, answer: str) -> float:
    """Add the numbers of the prompt.

    The arguments are found by their names. `prompt` and `answer` are of the item, and so is every field of its row;
    `base_url`, `api_key` and `model` are what an OpenAI client wants to know.

    Returns:
        The reward. With None instead, the rewards of the item's source would score the last turn.
    """
    client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    # The tiny model has no chat template, so a single user message goes to it as it stands: "3+5+7=?\n".
    messages = [{"role": "user", "content": prompt}]
    # The temperature is the run's, whatever is asked for: training wants to know how tokens were drawn.
    completion = client.chat.completions.create(model=model, messages=messages)
    # An agent may go on as long as it likes: append the message to `messages`, add what a tool or a user says, ask
    # again. As long as it only appends, all of it is one trajectory, and no token is ever tokenized twice.
    text = completion.choices[0].message.content or ""
    return float(final_number(text) == final_number(answer))


def final_number(text: str) -> int | None:
    """What stands behind the last `####`; None where nothing does."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return int(found[-1]) if found else None
