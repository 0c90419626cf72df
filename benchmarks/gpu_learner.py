"""GPU check: the learner's train step; its peak of memory against the estimate, tokens per second, and MFU.

    python benchmarks/gpu_learner.py [--device cpu --small]

Rows of 8k and 16k tokens at the 1.5B shape in bfloat16, with and without gradient checkpointing, as far as the estimate
says that they fit. MFU is 6 operations per weight and token and the attention (`train_flops` in learner/costs.py),
divided by the peak of the data sheet (`peak_flops` there). For an unknown device the measured rate of a product of
matrices takes the place of the peak.
"""

from __future__ import annotations

import gc
import math

import torch
from generation_shapes import Limits
from gpu_part import GIB, Part, run
from learner_memory import measure
from shapes import SHAPES, save_random

from areal_rloo.config import load_config
from areal_rloo.learner.costs import peak_flops
from areal_rloo.learner.memory import OVERHEAD_BYTES, estimate
from areal_rloo.models.device import memory_of

CASES = ((8192, False), (8192, True), (16_384, False), (16_384, True))  # tokens of a row, gradient checkpointing
SMALL_CASES = ((256, False), (512, True))
GOAL_MFU = 0.3


def check(part: Part) -> None:
    name, cases = ("small", SMALL_CASES) if part.small else ("1.5b", CASES)
    folder = save_random(part.folder / name, SHAPES[name])
    flops, source = peak_flops(part.device, configured=None, dtype="bfloat16"), "data sheet"
    if math.isnan(flops):
        flops, source = Limits.of(part.device, torch.bfloat16).arithmetic, "measured product of matrices"
    part.row("assumed peak", tflop_per_s=round(flops / 1e12, 2), source=source)
    num_measured = 0
    for num_tokens, again in cases:
        options = [
            "model.dtype=bfloat16",
            f"learner.gradient_checkpointing={str(again).lower()}",
            f"learner.peak_flops={flops:.6g}",
        ]
        config = load_config("quickstart.yaml", [f"learner.microbatch_tokens={num_tokens}", *options])
        needed = sum(estimate(SHAPES[name], config).values()) + OVERHEAD_BYTES * part.on_gpu
        there = memory_of(part.device).total_bytes
        if needed > there:
            part.notes.append(
                f"rows of {num_tokens} tokens, checkpointing {again}: not run, the estimate is {needed / GIB:.1f} GiB, "
                f"the device has {there / GIB:.1f}"
            )
            continue
        _case(
            part, name, num_tokens, again, measure(SHAPES[name], num_tokens, options, path=folder, device=part.device)
        )
        num_measured += 1
        gc.collect()
        if part.on_gpu:
            torch.cuda.empty_cache()
    part.goal(num_measured > 0, "no case fits into this device")


def _case(part: Part, name: str, num_tokens: int, again: bool, row: dict[str, float]) -> None:
    ratio, mfu = row["estimated_over_measured"], row["model_flops_share"]
    part.row(
        "train step",
        shape=name,
        row_tokens=num_tokens,
        checkpointing=again,
        measured_gib=round(row["measured_bytes"] / GIB, 2),
        estimated_gib=round(row["estimated_bytes"] / GIB, 2),
        estimated_over_measured=ratio,
        held_by_allocator_gib=round(row["held_bytes"] / GIB, 2),
        tokens_per_s=round(row["learner_tokens_per_s"]),
        mfu=round(mfu, 3),
    )
    case = f"rows of {num_tokens} tokens, checkpointing {again}"
    part.check(math.isfinite(row["gradient_norm"]), f"{case}: the norm of the gradient is {row['gradient_norm']}")
    if part.on_gpu:  # on a CPU the allocator hides the peak of a small model
        part.goal(0.9 <= ratio <= 1.25, f"{case}: estimated over measured memory is {ratio}, goal 0.9 to 1.25")
        beyond = row["held_bytes"] - row["estimated_bytes"]
        part.goal(beyond < OVERHEAD_BYTES, f"{case}: the allocator holds {beyond / GIB:.1f} GiB above the estimate")
        part.goal(mfu >= GOAL_MFU, f"{case}: MFU {mfu:.2f}, goal {GOAL_MFU}")


if __name__ == "__main__":
    run(check)
