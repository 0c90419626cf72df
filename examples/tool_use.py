"""Train a policy to use a calculator. The run executes the calls, and trains only on tokens of the policy.

    python examples/tool_use.py

First, make a tiny model that calls the calculator in half of the answers and guesses otherwise (minutes, once). Then
train the model: calls give higher rewards, so after some steps the policy always calls. Overrides go to the launcher,
for example `python examples/tool_use.py rollout.episode.max_turns=3`. A model with tools in the chat template only
needs `rollout.episode.type=tool_use 'rollout.episode.tools=[calculator, python]'`.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from areal_rloo.config import Config, SourceConfig, load_config
from areal_rloo.launcher import local
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.program import run_main
from areal_rloo.tasks import Item
from areal_rloo.tasks.arithmetic import ArithmeticTask
from areal_rloo.tasks.chat import ChatFormat, chat_format
from areal_rloo.trajectory import Message

CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
OVERRIDES = [
    "model.path=runs/tool_use_model",
    "rollout.episode.type=tool_use",
    "rollout.episode.tools=[calculator]",
    "rollout.episode.max_turns=2",
    "rollout.sampling.max_new_tokens=96",
    "data.max_prompt_tokens=256",  # the description of the tool has about two hundred tokens, a byte each
    "data.eval.num_prompts=50",
    "learner.groups_per_step=16",
    "learner.num_train_steps=30",
]


def main(arguments: Sequence[str]) -> int:
    """Make the model if the model is missing, then start a run."""
    steps = [argument.removeprefix("--demonstrations=") for argument in arguments if "--demonstrations=" in argument]
    given = [argument for argument in arguments if "--demonstrations=" not in argument]
    keys = {argument.removeprefix("--").partition("=")[0] for argument in given}
    overrides = [*(default for default in OVERRIDES if default.partition("=")[0] not in keys), *given]
    config = load_config("quickstart.yaml", overrides)
    if not (Path(config.model.path) / "config.json").is_file():
        demonstrate(config, num_steps=int(steps[0]) if steps else 900)
    return local.main(["--config", "quickstart.yaml", *overrides])


def demonstrate(config: Config, *, num_steps: int) -> None:
    """Train on conversations; half of the conversations call the calculator.

    Start from the model of the quickstart, which can add step by step. As in models with tools, the fixed parts of a
    call become single tokens.
    """
    rng = random.Random(0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(prepare_tiny_model(config).path, dtype=torch.float32)
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([CALL, CALLED, "<tool_response>", "</tool_response>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    chat = chat_format(tokenizer, config)
    items = ArithmeticTask(SourceConfig(), seed=0).items("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, 2 * (1 - step / num_steps))
        conversations = [conversation(chat, items[rng.randrange(len(items))], rng) for _ in range(8)]
        width = max(len(tokens) for tokens, _ in conversations)
        padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in conversations])
        labels = torch.tensor([marks + [-100] * (width - len(marks)) for _, marks in conversations])
        loss = model(input_ids=padded, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"demonstrations: step {step}/{num_steps}, loss {loss.item():.3f}")
    model.save_pretrained(config.model.path)
    tokenizer.save_pretrained(config.model.path)


def conversation(chat: ChatFormat, item: Item, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return token ids of a whole conversation, and labels: -100 for tokens of the user and the tool."""
    tokens = list(chat.prompt(item))
    labels = [-100] * len(tokens)
    answer = int(item.answer.removeprefix("#### "))
    if rng.random() < 0.5:
        written = chat.encode(CALL + item.text.partition("=")[0] + CALLED, end=True)
        said = list(chat.between([Message("tool", str(answer))], last_token=written[-1]))
        tokens += [*written, *said]
        labels += [*written, *[-100] * len(said)]
    else:
        answer += rng.choice((-3, -2, -1, 1, 2, 3))  # a guess
    written = chat.encode(f"#### {answer}", end=True)
    return tokens + written, labels + written


if __name__ == "__main__":
    sys.exit(run_main(main))
