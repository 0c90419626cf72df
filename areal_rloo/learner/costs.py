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

from areal_rloo.config import MOST_BETA, Config
from areal_rloo.errors import ArealRlooError, UserError
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


class OutOfMemoryError(ArealRlooError):
    """Memory ran out in a run that had enough for earlier steps: a restart may go well."""


def counted(policy: Policy) -> tuple[Sizes, int]:
    """Return the sizes of a model with the number of its parameters, and the number of those with a gradient."""
    sizes = Sizes.of(policy.causal.config.to_dict())
    assert sizes is not None, "the model has been loaded"
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in policy.parameters()]
    return replace(sizes, counted=sum(n for n, _ in numbers)), sum(n for n, has_gradient in numbers if has_gradient)


@contextmanager
def memory_explained(
    model: tuple[Sizes, int | None],
    config: Config,
    device: torch.device,
    *,
    late: bool,
    work: str = "",
    resumes: bool = False,
) -> Iterator[None]:
    """Explain an out-of-memory error of the block by the estimate and the options that lower it.

    `model`: as `counted`; None instead of the number of trained parameters: as the sizes say. `work`: names the block;
    empty for a train step, whose rows take the most. `resumes`: the block reads a checkpoint, whose states have their
    dtypes already.

    Raises:
        UserError: memory ran out before the run took an optimizer step.
        OutOfMemoryError: memory ran out later (`late`).
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not any(words in str(error) for words in _WORDS):
            raise
        words = _out_of_memory(model, config, device, late=late, work=work, begun=late or resumes)
        raise (OutOfMemoryError(words) if late else UserError(words)) from error


def _out_of_memory(
    model: tuple[Sizes, int | None], config: Config, device: torch.device, *, late: bool, work: str, begun: bool
) -> str:
    learner, (sizes, num_trained) = config.learner, model
    on_gpu = device.type == "cuda"
    parts = estimate(sizes, config, on_gpu=on_gpu, num_trained=num_trained)
    of_token = activation_bytes(sizes, config, on_gpu=on_gpu)
    free, total = memory_of(device)
    beside = (
        f" beside the engine (rollout.share_devices={config.rollout.share_devices})" if config.rollout.shares else ""
    )
    what = work or f"a step with learner.microbatch_tokens={learner.microbatch_tokens}"
    remedies = ", ".join(_remedies(config, begun=begun, in_step=not work, on_gpu=on_gpu))
    return (
        f"out of memory: {what} did not fit; a step needs about {sum(parts.values()) / GIB:.2f} GiB on each rank "
        f"({in_words(parts)}; {of_token / 1024:.0f} KiB a token), {free / GIB:.2f} of {total / GIB:.2f} GiB were free"
        f"{beside}; {'if this repeats, ' if late else ''}{remedies or 'take a larger host or a smaller model'}; then "
        "areal-rloo resume RUN_FOLDER"
    )


def _remedies(config: Config, *, begun: bool, in_step: bool, on_gpu: bool) -> Iterator[str]:
    """Give options that lower the memory and are allowed for this config, with a checkpoint too if `begun`."""
    learner, rollout = config.learner, config.rollout
    if in_step and learner.microbatch_tokens > config.trajectory_tokens:
        yield f"lower learner.microbatch_tokens={learner.microbatch_tokens} (at least {config.trajectory_tokens})"
    if in_step and not learner.gradient_checkpointing:
        yield "set learner.gradient_checkpointing=true"
    if on_gpu and learner.offload != "parameters":
        yield "set learner.offload=parameters"
    optimizer = learner.optimizer
    if not begun and optimizer.state_dtype == "float32" and learner.lora is None:
        beta = optimizer.betas[1]
        betas = f" and learner.optimizer.betas=[{optimizer.betas[0]:g}, {MOST_BETA}]" if beta > MOST_BETA else ""
        yield f"set learner.optimizer.state_dtype=bfloat16{betas}"
    if on_gpu and not rollout.shares:  # on a CPU, all ranks have the same memory
        yield f"set learner.num_ranks={learner.num_ranks + learner.num_replicas}"
    if rollout.shares and rollout.num_slots > 1:
        yield f"lower rollout.num_slots={rollout.num_slots}"
    if rollout.shares and not rollout.takes_turns:
        yield "set rollout.share_devices=in_turns"
