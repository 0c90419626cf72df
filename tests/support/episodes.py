"""Episodes to test: a config, an engine that follows a script, rewards by turn, and a real engine that is recorded."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from support.chat_endpoint import Recorder

from areal_rloo.config import Config, load_config
from areal_rloo.engines.base import SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.episode import SampleEngine, Submitter, TurnEngine
from areal_rloo.trajectory import Completion

CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 1


def watched_engine(folder: Path) -> Recorder:
    """Make a real engine that records its requests and completions."""
    return Recorder(
        EmbeddedEngine(
            folder, device=torch.device("cpu"), dtype=torch.float32, num_slots=16, context_tokens=256, policy_version=3
        )
    )


class RewardsByTurn:
    """Give each turn the next of these rewards, and later turns the last reward."""

    def __init__(self, *rewards: float) -> None:
        self._rewards = rewards
        self.requests: list[RewardRequest] = []

    async def score(self, request: RewardRequest) -> Scored:
        self.requests.append(request)
        reward = self._rewards[min(len(request.turns), len(self._rewards)) - 1]
        return Scored(reward=reward, parts={"mine": reward})


def episode_config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", ["rollout.sampling.max_new_tokens=96", *overrides])


def engine_of(submitter: Submitter, number: int, config: Config) -> SampleEngine:
    # Two stop tokens of 258: a turn of the random model ends by itself now and then.
    sampling = SamplingParameters(
        max_new_tokens=config.rollout.sampling.max_new_tokens, seed=number, stop_token_ids=(EOS, 40, 41, 42, 43)
    )
    return SampleEngine(submitter=submitter, name=f"{number}/0", sampling=sampling)


class ScriptedTurns(TurnEngine):
    """An engine that gives these texts, each with an end of turn. A text that ends in ~ has no end of turn."""

    max_new_tokens = 200_000

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._tokenizer = make_tiny_tokenizer()
        self.seen: list[str] = []

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        self.seen.append(str(self._tokenizer.decode(list(tokens), skip_special_tokens=False)))
        text = self._texts.pop(0)
        ids = [*self._tokenizer.encode(text), *([] if text.endswith("~") else [EOS])][:max_new_tokens]
        made = np.array(ids, np.int32)
        reason = "stop" if ids[-1] == EOS else "length"
        return Completion(made, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32), reason)  # type: ignore[arg-type]
