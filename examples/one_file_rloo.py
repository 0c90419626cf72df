"""RLOO in one file and one process, without concurrency: the reference for the asynchronous system.

    python examples/one_file_rloo.py --num-steps 15

No staleness, no wire, no workers: sample a batch, score, take a step, repeat. This file has the whole algorithm;
`tests/unit/learner/test_oracle.py` compares this gradient with the learner's gradient, on the same trajectories. Model
and task come from quickstart.yaml: a tiny model learns to add, in a few minutes on two cores.

    A_i = r_i - mean of the other rewards of its group                      (arXiv:2402.14740)
    L   = -1/N sum_t w_t min(rho_t A_i, clip(rho_t, 0.8, 1.2) A_i)          (arXiv:1707.06347, 2110.00641)
          rho = current / proximal, w = proximal / behaviour without gradient, at most 5
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from areal_rloo.config import load_config
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.models.files import load_tokenizer
from areal_rloo.tasks import Item, load_eval, load_train

CLIP = (0.8, 1.2)
MOST_WEIGHT = 5.0


@dataclass(frozen=True)
class Sampled:
    """A sampled completion.

    Attributes:
        prompt: token ids.
        completion: token ids, the end of the sequence included.
        behaviour_logprobs: [num_completion_tokens] float32, of the sampling policy.
        reward: of the completion.
    """

    prompt: list[int]
    completion: list[int]
    behaviour_logprobs: Tensor
    reward: float


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Compute the advantages of a group: each reward minus the mean of the other rewards."""
    total, num = sum(rewards), len(rewards)
    return [reward - (total - reward) / (num - 1) for reward in rewards]


def logprobs_of(model: PreTrainedModel, sampled: Sequence[Sampled], temperature: float) -> list[Tensor]:
    """Compute logprobs of each completion, [num_completion_tokens] float32, under the current policy.

    Padding is on the right, where a causal model does not look.
    """
    width = max(len(one.prompt) + len(one.completion) for one in sampled)
    rows = [[*one.prompt, *one.completion, *[0] * (width - len(one.prompt) - len(one.completion))] for one in sampled]
    logits = model(input_ids=torch.tensor(rows)).logits / temperature
    every = logits.log_softmax(-1)
    parts = []
    for row, one in enumerate(sampled):
        predicts = torch.arange(len(one.completion)) + len(one.prompt) - 1
        parts.append(every[row, predicts, torch.tensor(one.completion)])
    return parts


def loss_of(current: Sequence[Tensor], sampled: Sequence[Sampled], advantages: Sequence[float]) -> Tensor:
    """Compute the decoupled PPO loss, a mean over all tokens.

    With a single optimizer step per batch, the proximal policy equals the current policy: rho is 1, with a gradient.
    Without staleness, w is 1 up to rounding.
    """
    terms = []
    for logprobs, one, advantage in zip(current, sampled, advantages, strict=True):
        proximal = logprobs.detach()
        weight = (proximal - one.behaviour_logprobs).exp().clamp(max=MOST_WEIGHT)
        ratio = (logprobs - proximal).exp()
        terms.append(weight * torch.minimum(ratio * advantage, ratio.clamp(*CLIP) * advantage))
    return -torch.cat(terms).mean()


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompt: list[int], *, num: int, eos: int, max_new_tokens: int, temperature: float
) -> list[tuple[list[int], Tensor]]:
    """Sample completions of a prompt, with their logprobs; temperature 0 takes the likeliest token."""
    tokens = torch.tensor([prompt] * num)
    completions: list[list[int]] = [[] for _ in range(num)]
    logprobs: list[list[Tensor]] = [[] for _ in range(num)]
    ended = [False] * num
    cache = None
    for _ in range(max_new_tokens):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        every = (out.logits[:, -1] / (temperature or 1.0)).log_softmax(-1)
        chosen = every.argmax(-1) if temperature == 0 else torch.multinomial(every.exp(), 1).squeeze(1)
        for row in range(num):
            if not ended[row]:
                completions[row].append(int(chosen[row]))
                logprobs[row].append(every[row, chosen[row]])
                ended[row] = int(chosen[row]) == eos
        if all(ended):
            break
        tokens = chosen[:, None]
    return [(completion, torch.stack(own)) for completion, own in zip(completions, logprobs, strict=True)]


def reward_of(text: str, answer: str) -> float:
    """Return 1 if the last line has the answer, for example `#### 15`."""
    found = re.findall(r"####\s*(-?\d+)\s*$", text)
    return float(bool(found) and found[-1] == answer.removeprefix("#### "))


class Run:
    """The loop."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        config = load_config("quickstart.yaml", [f"run.seed={arguments.seed}", *arguments.overrides])
        self._sampling = config.rollout.sampling
        folder = prepare_tiny_model(config).path
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        (train,) = load_train(config.data, seed=arguments.seed)
        (held_out,) = load_eval(config.data, seed=arguments.seed)
        self._items, self._held_out = train.items, held_out.items[: arguments.num_eval_prompts]
        self._order = torch.randperm(len(self._items), generator=torch.Generator().manual_seed(arguments.seed))

    def go(self) -> None:
        """Train, and print accuracy before and after."""
        print(f"greedy accuracy before: {self.accuracy():.3f}")
        for step in range(self._arguments.num_steps):
            started_s = time.perf_counter()
            reward = self.step(step)
            print(f"step {step + 1}: reward {reward:.3f}, {time.perf_counter() - started_s:.1f} s")
        print(f"greedy accuracy after: {self.accuracy():.3f}")

    def step(self, step: int) -> float:
        """Sample, score and learn; return the mean reward."""
        num = self._arguments.groups_per_step
        places = self._order[torch.arange(step * num, (step + 1) * num) % len(self._order)].tolist()
        sampled: list[Sampled] = []
        advantages: list[float] = []
        for item in (self._items[place] for place in places):
            group = self.sample_group(item, self._arguments.group_size, self._sampling.temperature)
            sampled += group
            advantages += leave_one_out([one.reward for one in group])
        loss = loss_of(logprobs_of(self._model, sampled, self._sampling.temperature), sampled, advantages)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return sum(one.reward for one in sampled) / len(sampled)

    def sample_group(self, item: Item, num: int, temperature: float) -> list[Sampled]:
        """Sample and score completions of a prompt."""
        prompt = self._tokenizer.encode(item.text)
        drawn = sample(
            self._model,
            prompt,
            num=num,
            eos=int(self._tokenizer.eos_token_id),
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=temperature,
        )
        texts = [str(self._tokenizer.decode(completion, skip_special_tokens=True)) for completion, _ in drawn]
        rewards = [reward_of(text, item.answer) for text in texts]
        return [Sampled(prompt, *one, reward) for one, reward in zip(drawn, rewards, strict=True)]

    def accuracy(self) -> float:
        """Compute the greedy accuracy on held-out prompts."""
        return sum(self.sample_group(item, 1, 0.0)[0].reward for item in self._held_out) / len(self._held_out)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=15)
    parser.add_argument("--groups-per-step", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--num-eval-prompts", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of quickstart.yaml, for example model.tiny.num_layers=2")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    Run(arguments).go()


if __name__ == "__main__":
    main()
