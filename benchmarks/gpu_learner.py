"""GPU check: the learner's train step; its peak of memory against the estimate, tokens per second, and MFU.

    python -m benchmarks.gpu_learner [--device cpu --small]

Rows of 8k and 16k tokens at the 1.5B shape in bfloat16, with and without gradient checkpointing, and with each option
that changes the memory, as far as the estimate says that they fit. MFU is 6 operations per weight and token and the
attention (`train_flops` in learner/costs.py), divided by the peak of the data sheet (`peak_flops` there). For an
unknown device the measured rate of a product of matrices takes the place of the peak.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch

from areal_rloo.config import load_config
from areal_rloo.learner.costs import peak_flops
from areal_rloo.learner.memory import OVERHEAD_BYTES, estimate
from areal_rloo.models.device import memory_of
from benchmarks.generation_shapes import Limits
from benchmarks.gpu_part import GIB, Part, run
from benchmarks.learner_memory import measure
from benchmarks.shapes import SHAPES, save_random

_AGAIN = "learner.gradient_checkpointing=true"
CASES: tuple[tuple[int, tuple[str, ...]], ...] = (  # tokens of a row, options
    (8192, ()),
    (8192, (_AGAIN,)),
    (16_384, ()),
    (16_384, (_AGAIN,)),
    (8192, ("algorithm.kl.coefficient=0.1",)),
    (8192, ("learner.optimizer.state_dtype=bfloat16",)),
    (8192, ("learner.lora={}",)),
    (8192, ("algorithm.loss.ratio_level=sequence_mean",)),
)
SMALL_CASES = ((256, ()), (512, (_AGAIN,)))
GOAL_MFU = 0.3


def check(part: Part) -> None:
    name, cases = ("small", SMALL_CASES) if part.small else ("1.5b", CASES)
    folder = save_random(part.folder / name, SHAPES[name])
    flops, source = peak_flops(part.device, configured=None, dtype="bfloat16"), "data sheet"
    if math.isnan(flops):
        flops, source = Limits.of(part.device, torch.bfloat16).arithmetic, "measured product of matrices"
    part.row("assumed peak", tflop_per_s=round(flops / 1e12, 2), source=source)
    num_measured = 0
    for num_tokens, case in cases:
        if "learner.lora={}" in case and importlib.util.find_spec("peft") is None:
            part.notes.append("LoRA: not run, because peft is not installed")
            continue
        options = ["model.dtype=bfloat16", f"learner.peak_flops={flops:.6g}", *case]
        config = load_config("quickstart.yaml", [f"learner.microbatch_tokens={num_tokens}", *options])
        needed = sum(estimate(SHAPES[name], config, on_gpu=part.on_gpu).values()) + OVERHEAD_BYTES * part.on_gpu
        there = memory_of(part.device).total_bytes
        words = f"rows of {num_tokens} tokens, {_named(case)}"
        if needed > there:
            part.notes.append(
                f"{words}: not run, the estimate is {needed / GIB:.1f} GiB, the device has {there / GIB:.1f}"
            )
            continue
        try:
            row = measure(SHAPES[name], num_tokens, options, path=folder, device=part.device)
        except torch.OutOfMemoryError as error:
            part.check(False, f"{words}: the estimate is {needed / GIB:.1f} GiB, and torch says: {str(error)[:200]}")
        else:
            _judge(part, words, row)
            num_measured += 1
        gc.collect()
        if part.on_gpu:
            torch.cuda.empty_cache()
    part.goal(num_measured > 0, "no case fits into this device")


def _named(options: Sequence[str]) -> str:
    return options[0] if options else "plain"


def _judge(part: Part, case: str, row: dict[str, Any]) -> None:
    ratio, mfu = row["estimated_over_measured"], row["model_flops_share"]
    part.row(
        "train step",
        case=case,
        measured_gib=round(row["measured_bytes"] / GIB, 2),
        estimated_gib=round(row["estimated_bytes"] / GIB, 2),
        estimated_over_measured=ratio,
        held_by_allocator_gib=round(row["held_bytes"] / GIB, 2),
        tokens_per_s=round(row["learner_tokens_per_s"]),
        mfu=round(mfu, 3),
    )
    part.check(math.isfinite(row["gradient_norm"]), f"{case}: the norm of the gradient is {row['gradient_norm']}")
    if part.on_gpu:  # on a CPU the allocator hides the peak of a small model
        part.goal(0.9 <= ratio <= 1.25, f"{case}: estimated over measured memory is {ratio}, goal 0.9 to 1.25")
        beyond = row["held_bytes"] - row["estimated_bytes"]
        part.goal(beyond < OVERHEAD_BYTES, f"{case}: the allocator holds {beyond / GIB:.1f} GiB above the estimate")
        part.goal(mfu >= GOAL_MFU, f"{case}: MFU {mfu:.2f}, goal {GOAL_MFU}")


if __name__ == "__main__":
    run(check, growing=True)
