"""What a train step needs of a device's memory, part by part: an estimate, for those who run out of it.

In: the config and the model's dimensions. Out: bytes by part, and a sentence with the options that make them fewer.
Activations are those that the backward pass keeps of the three families we train (norms, projections, attention and
gated MLP of each layer); what the allocator wastes is not in it.
"""

from __future__ import annotations

import psutil
import torch
from transformers import PreTrainedConfig

from areal_rloo.config import Config
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.layout import head_dim
from areal_rloo.models.logprobs import CHUNK_LOGITS

_GIB = 2**30
_WORDS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of allocators and libraries


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no more memory to give."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def activation_bytes(model: PreTrainedConfig, config: Config) -> float:
    """Kept for the backward pass, for each token of a microbatch."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * head_dim(model), model.num_key_value_heads * head_dim(model)
    low = computation_dtype(config.model).itemsize
    norm = hidden * (4 + 4 + low)  # its input, what it scales, and what the next product reads
    layer = 2 * norm + low * (3 * q + 2 * kv + 4 * inner)
    top = norm + 2 * 4 * hidden  # and the gradient that the head gives
    if config.learner.gradient_checkpointing:
        return float(model.num_hidden_layers * 4 * hidden + layer + top)
    return float(model.num_hidden_layers * layer + top)


def estimate(model: PreTrainedConfig, config: Config, *, num_parameters: int, num_trained: int) -> dict[str, float]:
    """Bytes of a rank by part, with full microbatches.

    Args:
        model: its dimensions.
        config: of the run.
        num_parameters: of the policy, over all ranks.
        num_trained: of these, how many have a gradient.
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
        "weights in bfloat16": low * num_parameters if low == 2 and ranks == 1 else 0,  # kept while they are used
        "whole layers": low * (num_parameters - head) / model.num_hidden_layers * 2 + low * head if ranks > 1 else 0,
        "activations": activation_bytes(model, config) * learner.microbatch_tokens,
        "logits": (4 * head if learner.lora is None else 0) + (2 * 4 + (low if low == 2 else 0)) * CHUNK_LOGITS,
    }
    return {part: float(size) for part, size in parts.items() if size}


def out_of_memory(model: PreTrainedConfig, config: Config, device: torch.device, parts: dict[str, float]) -> str:
    """What to say to somebody who ran out of memory."""
    learner = config.learner
    free, total = (
        torch.cuda.mem_get_info(device)
        if device.type == "cuda"
        else (psutil.virtual_memory().available, psutil.virtual_memory().total)
    )
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
        f"a token), {free / _GIB:.2f} of {total / _GIB:.2f} GiB were free; {', '.join(remedies)}; then --resume goes on"
    )
