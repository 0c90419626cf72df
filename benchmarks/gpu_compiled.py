"""GPU check: compiled layers (`learner.compile`) against eager layers: equal logprobs, and the times of both.

    python -m benchmarks.gpu_compiled [--device cpu --small]

Rows of several shapes, because layers are compiled for every shape at once. The 0.5B shape in bfloat16; on a CPU a
small model, with the backend that writes no C++ (aot_eager).
"""

from __future__ import annotations

import statistics
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import torch

from areal_rloo.config import load_config
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.policy import Policy, TokenLogprobs
from areal_rloo.trajectory import Completion, Trajectory
from benchmarks.gpu_part import Part, run
from benchmarks.peaks import finish
from benchmarks.shapes import SHAPES, save_random

_REPEATS = 3
_MEAN_GAP, _MOST_GAP = 2e-2, 0.3  # nats: a compiler rounds at other places


def check(part: Part) -> None:
    name, rows = ("small", [[9, 30, 4], [7] * 12]) if part.small else ("0.5b", [[1024] * 8, [4000, 96], [64] * 99])
    folder = save_random(part.folder / name, SHAPES[name])
    if not part.on_gpu:
        torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
        part.notes.append("On a CPU the layers are traced (aot_eager), and the times say nothing about a GPU.")
    eager, compiled = (_policy(part, folder, on) for on in ("false", "true"))
    for number, lengths in enumerate(rows):
        row = _row(lengths, SHAPES[name].vocab_size, part.device)
        expected, given = (_logprobs(policy, row) for policy in (eager, compiled))
        gap = (given - expected).abs()
        first_s = _step(compiled, row)
        seconds = {key: _median(policy, row) for key, policy in (("eager", eager), ("compiled", compiled))}
        part.row(
            "compiled against eager",
            shape=name,
            sequences=len(lengths),
            tokens=sum(lengths),
            mean_gap=float(f"{float(gap.mean()):.3g}"),
            largest_gap=float(f"{float(gap.max()):.3g}"),
            eager_s=round(seconds["eager"], 4),
            compiled_s=round(seconds["compiled"], 4),
            first_compiled_s=round(first_s, 2),
        )
        right = float(gap.mean()) < _MEAN_GAP and float(gap.max()) < _MOST_GAP
        part.check(right, f"row {number}: gaps of {float(gap.mean()):.2g}, at most {float(gap.max()):.2g}")
        if part.on_gpu:
            over = seconds["eager"] / seconds["compiled"]
            part.goal(over > 1, f"row {number}: compiled layers have {over:.2f} times the speed of eager ones, goal 1")


def _policy(part: Part, folder: Path, compiled: str) -> Policy:
    options = [f"learner.compile={compiled}", "model.dtype=bfloat16"]
    return build_rank(load_config("quickstart.yaml", options), model_path=str(folder), device=part.device).policy


def _row(lengths: list[int], vocabulary: int, device: torch.device) -> Row:
    random = np.random.default_rng(sum(lengths))
    trajectories = []
    for index, num in enumerate(lengths):
        tokens = random.integers(2, vocabulary, num).astype(np.int32)
        completion = Completion(tokens, np.zeros(num, np.float32), np.zeros(num, np.int32), "stop")
        trajectories.append(Trajectory(0, index, np.array([3, 4], np.int32), completion, 0.0))
    ((microbatch,),) = pack(trajectories, max_tokens=2**20).microbatches
    return Row.of(microbatch, device)


def _logprobs(policy: Policy, row: Row) -> torch.Tensor:
    with torch.no_grad():
        logprobs: torch.Tensor = policy(*row.inputs)[0]
    return logprobs


def _sum(given: TokenLogprobs, part: slice) -> torch.Tensor:
    return given.logprobs.sum()


def _step(policy: Policy, row: Row) -> float:
    """Return the seconds of a forward and a backward pass."""
    policy.zero_grad()
    started = time.perf_counter()
    loss, *_ = policy(*row.inputs, token_loss=_sum)
    loss.backward()
    finish(row.input_ids.device)
    return time.perf_counter() - started


def _median(policy: Policy, row: Row) -> float:
    return statistics.median(_step(policy, row) for _ in range(_REPEATS))


if __name__ == "__main__":
    run(check)
