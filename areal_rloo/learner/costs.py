"""Count the arithmetic of a train step, and explain a lack of memory by an estimate and options that lower it.

Arithmetic (for MFU, arXiv:2204.02311) is that of the forward and backward passes of trained tokens. Recomputation to
save memory and the forward passes for proximal and reference logprobs are not counted.

The memory estimate uses config and model dimensions. Activations are the tensors kept for the backward pass in the
three supported architectures (norms, projections, attention and gated MLP of each layer). Memory lost by the allocator
is not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from transformers import PreTrainedConfig

from areal_rloo.config import Config
from areal_rloo.errors import UserError
from areal_rloo.models.attention import head_dim
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.policy import CHUNK_LOGITS, Policy
from areal_rloo.trajectory import Trajectory

_GIB = 2**30
_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in error texts

# Dense bfloat16 FLOP/s from data sheets, by device name; the first match counts.
_PEAK_FLOPS = (
    *(("B200", 2250e12), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("A100", 312e12)),
    *(("L40S", 362e12), ("L4", 121e12), ("A10", 125e12), ("4090", 165e12), ("MI300X", 1307e12)),
)


def train_flops(
    config: PreTrainedConfig, lengths: Sequence[int], num_targets: Sequence[int], *, frozen: bool = False
) -> float:
    """Count the floating-point operations of forward and backward over sequences: three times those of forward.

    `lengths` and `num_targets` are, of each sequence, the tokens and the places that reach the head. `frozen`: the
    weights have no gradient, as with adapters (products of adapters are not counted).
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = config.hidden_size * head_dim(config) * (2 * heads + 2 * kv_heads)
    layer = projections + 3 * config.hidden_size * config.intermediate_size
    scores = sum(length * (length + 1) // 2 for length in lengths)  # a token attends to itself and all tokens before
    attention = 2 * heads * head_dim(config) * scores  # with keys, and with values
    head = config.vocab_size * config.hidden_size * sum(num_targets)
    weights = config.num_hidden_layers * layer * sum(lengths) + head
    return float((4 if frozen else 6) * weights + 6 * config.num_hidden_layers * attention)


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


def activation_bytes(model: PreTrainedConfig, config: Config) -> float:
    """Estimate the bytes kept for the backward pass, per token of a microbatch."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * head_dim(model), model.num_key_value_heads * head_dim(model)
    low = computation_dtype(config.model).itemsize
    norm = hidden * (4 + 4 + low)  # input, scaled value, and input of the next product
    layer = 2 * norm + low * (3 * q + 2 * kv + 4 * inner)
    top = norm + 2 * 4 * hidden  # and the gradient from the head
    if config.learner.gradient_checkpointing:
        return float(model.num_hidden_layers * 4 * hidden + layer + top)
    return float(model.num_hidden_layers * layer + top)


def _logit_bytes(config: Config) -> int:
    """Return the bytes for each logit of a chunk: the float32 buffers and products alive at the same time."""
    loss = config.algorithm.loss
    if not loss.of_tokens:  # autograd keeps more of a chunk, and more of an entropy with a gradient
        return 4 * (4 if loss.entropy_coefficient == 0 else 6)
    return 4 * 3 + (2 if computation_dtype(config.model) == torch.bfloat16 else 0)


def estimate(model: PreTrainedConfig, config: Config, *, num_parameters: int, num_trained: int) -> dict[str, float]:
    """Estimate the bytes of a rank by part, with full microbatches.

    `num_parameters` counts the policy over all ranks, `num_trained` the parameters with a gradient.
    """
    learner = config.learner
    ranks = learner.num_ranks // learner.num_replicas
    low = computation_dtype(config.model).itemsize
    moments = 2 * (4 if learner.optimizer.state_dtype == "float32" else 2)
    reference = config.algorithm.kl.coefficient > 0 and config.model.reference is not None
    at_home = config.model.reference is not None and config.model.reference.offload
    head = model.vocab_size * model.hidden_size
    away = learner.offload == "parameters"
    parts = {
        "weights": 0 if away else 4 * num_parameters / ranks,
        "gradients": 0 if away else 4 * num_trained / ranks,
        "optimizer": 0 if learner.offload != "none" else moments * num_trained / ranks,
        "reference": 4 * num_parameters / ranks if reference and not at_home and not away else 0,
        "weights in bfloat16": low * num_parameters if low == 2 and ranks == 1 else 0,  # kept during use
        "whole layers": low * (num_parameters - head) / model.num_hidden_layers * 2 + low * head if ranks > 1 else 0,
        "activations": activation_bytes(model, config) * learner.microbatch_tokens,
        "logits": (4 * head if learner.lora is None else 0) + _logit_bytes(config) * CHUNK_LOGITS,
    }
    return {part: float(size) for part, size in parts.items() if size}


def _out_of_memory(policy: Policy, config: Config, device: torch.device) -> str:
    model, learner = policy.causal.config, config.learner
    num_parameters = sum(p.numel() for p in policy.parameters())
    num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    parts = estimate(model, config, num_parameters=num_parameters, num_trained=num_trained)
    host = psutil.virtual_memory()
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (host.available, host.total)
    shown = " + ".join(f"{part} {size / _GIB:.2f}" for part, size in sorted(parts.items(), key=lambda item: -item[1]))
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
        f"{sum(parts.values()) / _GIB:.2f} GiB on each rank ({shown}; {activation_bytes(model, config) / 1024:.0f} KiB "
        f"a token), {free / _GIB:.2f} of {total / _GIB:.2f} GiB were free; "
        f"{', '.join(remedies)}; then continue with --resume"
    )
