"""How long does a train step keep all GPUs waiting for the work of rank 0, compared with a copy of the batch?

While rank 0 masks, normalizes, packs, encodes and diagnoses, every GPU of the learner waits. The benchmark takes real
train steps on one core, with 1, 8 and 64 ranks and a model that is not computed: rank 0 gets answers that were made
before, and the bytes that it sends are counted and not sent. `overhead` is the time of the step with the numbers of the
batch for the record. `ahead` is what is left of it if a thread prepared the batch during the step before
(learner/ahead.py). The named alternative is `copy`: the time to copy the tokens, logprobs and versions of the batch
once, which is the least that any step needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_rloo.algorithm.diagnostics import measure
from areal_rloo.algorithm.loss import TokenOutcomes
from areal_rloo.config import load_config
from areal_rloo.learner.packing import Microbatch
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.rank import LearnerRank, Trained
from areal_rloo.learner.reporting import batch_numbers
from areal_rloo.learner.team import Team, _encode
from areal_rloo.learner.train_step import Prepared, TrainStep
from areal_rloo.models.policy import Policy
from areal_rloo.trajectory import Completion, Group, Trajectory
from benchmarks.harness import Benchmark, Case, timed

# ranks, groups of 16 samples, median of the log-normal lengths
SIZES = ((1, 64, 500), (8, 64, 500), (8, 64, 2000), (64, 512, 2000))
_VERSION = 10
_LONGEST = 8192
_COPIES = 15  # a single copy of the smallest batch takes about a millisecond


class Counted(Ranks):
    """The other ranks, as rank 0 sees them: each answers at once, and only the bytes are counted."""

    def __init__(self, num: int, answer: bytes) -> None:
        super().__init__(0, num)
        self.sent_bytes, self._answer = 0, answer

    def hand_out(self, messages: Sequence[bytearray]) -> None:
        self.sent_bytes = sum(map(len, messages))

    def answers(self) -> list[memoryview]:
        return [memoryview(self._answer)] * (self.num - 1)


class Uncomputed(LearnerRank):
    """Rank 0, whose share of the rows is trained already."""

    trained: Trained

    def train(self, minibatches: Sequence[Sequence[Microbatch]], kl_coefficient: float) -> Trained:
        return self.trained


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(1)
    for num_ranks, num_groups, median in ((2, 2, 50),) if quick else SIZES:
        yield _case(num_ranks, num_groups, median, rounds=2 if quick else 7)


def _case(num_ranks: int, num_groups: int, median: int, *, rounds: int) -> Case:
    rng = np.random.default_rng(0)
    groups = [_group(rng, index, median) for index in range(num_groups)]
    completions = [trajectory.completion for group in groups for trajectory in group.trajectories]
    million_tokens = sum(len(completion.tokens) for completion in completions) / 1e6
    train_step, ranks = _train_step(num_ranks)
    facts = {"ranks": num_ranks, "median_tokens": median, "million_tokens": round(million_tokens, 4)}
    prepared = train_step.prepare(groups, policy_version=_VERSION)
    contestants: dict[str, Callable[[], float]] = {
        "overhead": lambda: timed(partial(_step, train_step, groups, ranks, facts)) / million_tokens,
        "ahead": lambda: timed(partial(_rest, train_step, prepared, groups)) / million_tokens,
        "copy": lambda: timed(partial(_copy, completions)) / million_tokens / _COPIES,
    }
    name = f"{num_ranks}_ranks_{num_groups}_groups_{median}_tokens"
    pairs = [("overhead", "copy"), ("ahead", "copy")]
    return Case(name, "s/million tokens", contestants, pairs, rounds, facts=facts)


def _step(train_step: TrainStep, groups: list[Group], ranks: Counted, facts: dict[str, Any]) -> None:
    train_step.step(groups, policy_version=_VERSION)
    batch_numbers(groups)
    facts["sent_bytes_per_token"] = round(ranks.sent_bytes / facts["million_tokens"] / 1e6, 1)
    facts["answer_bytes_per_rank"] = len(ranks.answers()[0]) if ranks.num > 1 else 0


def _rest(train_step: TrainStep, prepared: Prepared, groups: list[Group]) -> None:
    train_step.train(prepared, started_s=time.perf_counter())
    batch_numbers(groups)


def _copy(completions: list[Completion]) -> None:
    for name in _COPIES * ("tokens", "behaviour_logprobs", "versions"):
        np.concatenate([getattr(completion, name) for completion in completions])


def _group(rng: np.random.Generator, group_id: int, median: int) -> Group:
    prompt = rng.integers(0, 150_000, 128).astype(np.int32)
    trajectories = []
    for index in range(16):
        num = int(np.clip(rng.lognormal(np.log(median), 0.6), 8, _LONGEST))
        completion = Completion(
            rng.integers(0, 150_000, num).astype(np.int32),
            -rng.random(num, dtype=np.float32),
            np.sort(rng.integers(_VERSION - 2, _VERSION + 1, num)).astype(np.int32),
            "stop",
        )
        trajectories.append(Trajectory(group_id, index, prompt, completion, float(rng.integers(0, 2))))
    return Group(group_id, _VERSION + 2, tuple(trajectories))


def _train_step(num_ranks: int) -> tuple[TrainStep, Counted]:
    config = load_config(
        "quickstart.yaml",
        [
            "learner.num_minibatches=1",
            "learner.microbatch_tokens=16384",
            "algorithm.max_staleness=2",
        ],
    )
    shape = Qwen2Config(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    rank = Uncomputed(
        Policy(Qwen2ForCausalLM(shape), temperature=1.0, dtype=torch.float32), config, device=torch.device("cpu")
    )
    random = torch.rand(3000)
    outcomes = dict.fromkeys(TokenOutcomes._fields, -random) | {"staleness": (random * 3).int()}
    times = dict.fromkeys(("proximal", "forward", "backward", "optimizer"), 0.0)
    rank.trained = Trained([True], [1.0], [0.1], [measure(TokenOutcomes(**outcomes))], times)
    rank.ranks = ranks = Counted(num_ranks, bytes(_encode(rank.trained)))
    return TrainStep(Team(rank), config), ranks


BENCHMARK = Benchmark("step_overhead", __doc__, cases)
