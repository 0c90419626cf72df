"""Count the arithmetic of a train step, and explain a lack of memory by an estimate and options that lower it.

Arithmetic (for MFU, arXiv:2204.02311) is that of the forward and backward passes of trained tokens. Recomputation to
save memory and the forward passes for proximal and reference logprobs are not counted. The estimate is in `memory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from areal_rloo.config import Config
from areal_rloo.errors import UserError
from areal_rloo.learner.memory import GIB, activation_bytes, estimate, in_words
from areal_rloo.models.device import memory_of
from areal_rloo.models.policy import Policy
from areal_rloo.models.sizes import Sizes
from areal_rloo.trajectory import Trajectory

_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in error texts

# Dense bfloat16 FLOP/s from data sheets, by device name; the first match counts.
_PEAK_FLOPS = (
    *(("B200", 2250e12), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12)),
    *(("A100", 312e12), ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12), ("A10G", 70e12), ("A10", 125e12)),
    *(("4090", 165e12), ("MI300X", 1307e12)),
)


def train_flops(
    config: PreTrainedConfig, lengths: Sequence[int], num_targets: Sequence[int], *, frozen: bool = False
) -> float:
    """Count the floating-point operations of forward and backward over sequences: three times those of forward.

    `lengths` and `num_targets` are, of each sequence, the tokens and the places that reach the head. `frozen`: the
    weights have no gradient, as with adapters (products of adapters are not counted).
    """
    sizes = Sizes.of(config.to_dict())
    assert sizes is not None, "the learner trains families whose config.json has all sizes"
    layer = sum(rows * columns for rows, columns in sizes.matrices.values())
    scores = sum(length * (length + 1) // 2 for length in lengths)  # a token attends to itself and all tokens before
    attention = 2 * sizes.num_heads * sizes.head_dim * scores  # with keys, and with values
    weights = sizes.num_layers * layer * sum(lengths) + sizes.head * sum(num_targets)
    return float((4 if frozen else 6) * weights + 6 * sizes.num_layers * attention)


def speed(
    policy: Policy, trajectories: Sequence[Trajectory], train_step_s: float, *, peak_flops: float, config: Config
) -> dict[str, float]:
    """Give the seconds of a train step and the speed of its passes; `peak_flops` are of all ranks."""
    lengths = [trajectory.num_tokens - 1 for trajectory in trajectories]
    num_targets = [len(trajectory.completion.tokens) for trajectory in trajectories]
    flops = train_flops(policy.causal.config, lengths, num_targets, frozen=config.learner.lora is not None)
    return {
        "train_step_s": train_step_s,
        "learner_tokens_per_s": sum(lengths) / max(1e-9, train_step_s),
        "model_flops_share": flops / (peak_flops * train_step_s),
    }


def peak_flops(device: torch.device, *, configured: float | None, dtype: str) -> float:
    """Return FLOP/s of a device: configured, or from the data sheet; NaN if unknown."""
    if configured is not None:
        return configured
    if device.type != "cuda" or dtype != "bfloat16":
        return math.nan
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS if part in name), math.nan)


@contextmanager
def memory_explained(policy: Policy, config: Config, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a UserError with the estimate and the options that lower it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not any(words in str(error) for words in _WORDS):
            raise
        raise UserError(_out_of_memory(policy, config, device)) from error


def _out_of_memory(policy: Policy, config: Config, device: torch.device) -> str:
    learner, sizes = config.learner, Sizes.of(policy.causal.config.to_dict())
    assert sizes is not None, "the model has been loaded"
    sizes = replace(sizes, counted=sum(p.numel() for p in policy.parameters()))
    num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    on_gpu = device.type == "cuda"
    parts = estimate(sizes, config, on_gpu=on_gpu, num_trained=num_trained)
    of_token = activation_bytes(sizes, config, on_gpu=on_gpu)
    free, total = memory_of(device)
    remedies = [f"lower learner.microbatch_tokens={learner.microbatch_tokens}"]
    if not learner.gradient_checkpointing:
        remedies.append("set learner.gradient_checkpointing=true")
    if learner.offload != "parameters" and device.type == "cuda":
        remedies.append("set learner.offload=parameters")
    if learner.optimizer.state_dtype == "float32" and learner.lora is None:
        remedies.append("set learner.optimizer.state_dtype=bfloat16")
    remedies.append("raise learner.num_ranks")
    return (
        f"out of memory: a step with learner.microbatch_tokens={learner.microbatch_tokens} needs about "
        f"{sum(parts.values()) / GIB:.2f} GiB on each rank ({in_words(parts)}; "
        f"{of_token / 1024:.0f} KiB a token), {free / GIB:.2f} of {total / GIB:.2f} GiB were free; "
        f"{', '.join(remedies)}; then continue with --resume"
    )
