"""Compare the estimate of a learner's memory with the measured peak of a train step.

    python -m benchmarks.learner_memory [--cases plain lora] [--output benchmarks/results/learner_memory.json]

Random models with the shapes of Qwen2.5-0.5B and 1.5B, on a CPU, each case in a process of its own: two train steps on
two full rows, then the peak of the second. The gradients of the first row are there while the second row is computed.
The level before the model is built (Python and torch) does not count. Here the allocator returns freed memory at once,
so the peak is that of the tensors alive. With the defaults of glibc, the peak of a process is up to a fifth higher; a
GPU keeps blocks, too (`OVERHEAD_BYTES` in the plan of a run). A case takes minutes, the last one a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_rloo.config import Config, load_config
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.memory import estimate
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.team import Team, follow
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.sizes import Sizes
from areal_rloo.ports import ReservedPorts
from areal_rloo.trajectory import Completion, Group, Trajectory
from benchmarks import hardware
from benchmarks.peaks import Peak
from benchmarks.shapes import SHAPES, save_random

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {  # model, tokens of a row, options
    "plain": ("0.5b", 2048, ()),
    "checkpointing": ("0.5b", 4096, ("learner.gradient_checkpointing=true",)),
    "lora": ("0.5b", 2048, ("learner.lora={}",)),
    "reference": ("0.5b", 1024, ("algorithm.kl.coefficient=0.1",)),
    "sequence loss": ("0.5b", 1024, ("algorithm.loss.ratio_level=sequence_mean",)),
    "bfloat16": ("0.5b", 2048, ("model.dtype=bfloat16",)),
    "bfloat16 states": ("0.5b", 1024, ("learner.optimizer.state_dtype=bfloat16",)),
    "1.5B, lora": ("1.5b", 1024, ("learner.lora={}", "model.dtype=bfloat16", "learner.gradient_checkpointing=true")),
    "two ranks": ("0.5b", 1024, ("learner.num_ranks=2",)),
    "two ranks, untied": ("0.5b untied", 1024, ("learner.num_ranks=2",)),
    "two ranks, short rows": ("0.5b untied", 256, ("learner.num_ranks=2", "learner.gradient_checkpointing=true")),
    "two ranks, bfloat16": ("0.5b untied", 256, ("learner.num_ranks=2", "model.dtype=bfloat16")),
}
_RANKS_TIMEOUT_S = 3600.0
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc returns freed tensors at once


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        model, num_tokens, options = CASES[arguments.case]
        path = save_random(Path(arguments.folder) / model, SHAPES[model])
        measured = measure(SHAPES[model], num_tokens, options, path=path, device=torch.device("cpu"))
        del measured["model_flops_share"]  # the peak of a CPU is unknown
        print(json.dumps({"case": arguments.case, "model": model, **measured}))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases:
            command = [
                *(sys.executable, "-m", "benchmarks.learner_memory"),
                f"--case={name}",
                f"--folder={folder}",
                f"--threads={arguments.threads}",
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | EXACT)
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            print(row, flush=True)
            hardware.write(arguments.output, {"cases": rows})


def measure(
    sizes: Sizes, num_tokens: int, options: Sequence[str], *, path: Path, device: torch.device, num_steps: int = 2
) -> dict[str, Any]:
    """Take train steps on two full rows each; return the peak of the last, and the speed of the last."""
    peak = Peak(device)
    config = load_config(
        "quickstart.yaml", [f"learner.microbatch_tokens={num_tokens}", "learner.num_minibatches=1", *options]
    )
    num_ranks = config.learner.num_ranks
    with _other_ranks(config, path=path, device=device) as ranks:
        train_step = TrainStep(Team(build_rank(config, model_path=str(path), device=device, ranks=ranks)), config)
        for version in range(num_steps):
            peak.restart()
            groups = [_group(group_id, num_tokens, sizes.vocab_size) for group_id in range(2 * num_ranks)]
            result = train_step.step(groups, policy_version=version)
        measured = peak.num_bytes
        train_step.team.stop()
    own = train_step.team.own.policy
    expected = sum(
        estimate(
            replace(sizes, counted=sum(parameter.numel() for parameter in own.parameters())),
            config,
            on_gpu=device.type == "cuda",
            num_trained=sum(parameter.numel() for parameter in own.parameters() if parameter.requires_grad),
        ).values()
    )
    return {
        "row_tokens": num_tokens,
        "options": list(options),
        "measured_bytes": measured,
        "held_bytes": peak.held_bytes,
        "estimated_bytes": round(expected),
        "estimated_over_measured": round(expected / measured, 3),
        **{name: result.measured[name] for name in ("learner_tokens_per_s", "model_flops_share")},
        "gradient_norm": result.numbers["gradient_norm"],
    }


@contextmanager
def _other_ranks(config: Config, *, path: Path, device: torch.device) -> Iterator[Ranks]:
    """Start the other ranks of the learner, each with its part of the model; yields rank 0."""
    num = config.learner.num_ranks
    if num == 1:
        yield Ranks()
        return
    with ReservedPorts(1) as reserved:
        address = f"127.0.0.1:{reserved.ports[0]}"
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_follow, args=(rank, config, address, path)) for rank in range(1, num)]
        for process in processes:
            process.start()
        ranks = Ranks.meet(address, rank=0, num=num, device=device, timeout_s=_RANKS_TIMEOUT_S)
        yield ranks
        for process in processes:
            process.join()
        ranks.close()


def _follow(rank: int, config: Config, address: str, path: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    ranks = Ranks.meet(address, rank=rank, num=config.learner.num_ranks, device=device, timeout_s=_RANKS_TIMEOUT_S)
    follow(build_rank(config, model_path=str(path), device=device, ranks=ranks))
    ranks.close()


def _group(group_id: int, num_tokens: int, vocab_size: int) -> Group:
    """Make a group of two samples that fill a row: a prompt of 8 tokens, and a completion."""
    random = np.random.default_rng(0)
    trajectories = []
    for index in range(2):
        num = num_tokens // 2 - 7  # the last token of a sample is not an input
        completion = Completion(
            random.integers(2, vocab_size, num).astype(np.int32),
            np.full(num, -12.0, np.float32),
            np.zeros(num, np.int32),
            "stop",
        )
        prompt = random.integers(2, vocab_size, 8).astype(np.int32)
        trajectories.append(Trajectory(group_id, index, prompt, completion, float(index)))
    return Group(group_id, 2, tuple(trajectories))


if __name__ == "__main__":
    main()
