"""Measure the work of rank 0 in a train step beside the model, for a million completion tokens.

    python -m benchmarks.step_overhead [--output benchmarks/results/step_overhead.json]

While rank 0 masks, normalizes, packs, encodes and diagnoses, every GPU of the learner waits. The benchmark takes real
train steps on one core, with 1, 8 and 64 ranks and a model that is not computed: rank 0 gets answers that were made
before, and what it sends is counted and not sent. `overhead` is the time of the step with the numbers of the batch for
the record. The named alternative is `copy`: the time to copy the tokens, logprobs and versions of the batch once, which
is the least that any step needs. Steps and copies are interleaved, and results are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
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
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.policy import Policy
from areal_rloo.trajectory import Completion, Group, Trajectory
from benchmarks import hardware

# ranks, groups of 16 samples, median of the log-normal lengths
CASES = ((1, 64, 500), (8, 64, 500), (8, 64, 2000), (64, 512, 2000))
_VERSION = 10
_LONGEST = 8192


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_ranks, num_groups, median in CASES:
        row = _measured(num_ranks, num_groups, median, arguments.repeats)
        print(row, flush=True)
        rows.append(row)
    hardware.write(arguments.output, {"cases": rows})


def _measured(num_ranks: int, num_groups: int, median: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    groups = [_group(rng, index, median) for index in range(num_groups)]
    completions = [trajectory.completion for group in groups for trajectory in group.trajectories]
    num_tokens = sum(len(completion.tokens) for completion in completions)
    train_step, ranks = _train_step(num_ranks)
    overhead_s, copy_s = [], []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        train_step.step(groups, policy_version=_VERSION)
        batch_numbers(groups)
        overhead_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        for name in ("tokens", "behaviour_logprobs", "versions"):
            np.concatenate([getattr(completion, name) for completion in completions])
        copy_s.append(time.perf_counter() - started_s)
    seconds = [each / num_tokens * 1e6 for each in overhead_s[1:]]  # the first is a warm-up
    middle = statistics.median(seconds)
    return {
        "num_ranks": num_ranks,
        "median_tokens": median,
        "million_tokens": round(num_tokens / 1e6, 2),
        "overhead_s_per_million": round(middle, 4),
        "spread": round((max(seconds) - min(seconds)) / middle, 2),
        "over_copy": round(statistics.median(overhead_s[1:]) / statistics.median(copy_s[1:]), 1),
        "sent_bytes_per_token": round(ranks.sent_bytes / num_tokens, 1),
        "answer_bytes_per_rank": len(ranks.answers()[0]) if num_ranks > 1 else 0,
    }


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


if __name__ == "__main__":
    main()
