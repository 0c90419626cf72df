"""Estimate the memory of a learner rank from the config and the sizes of the model; without torch.

Activations are the tensors kept for the backward pass in a decoder layer, by family (`Kept` in `models/sizes.py`).
The sum is the peak of a step: of the backward pass, or of the optimizer step if that has more ("optimizer step").
Not included: memory lost by the allocator, the CUDA context, and buffers of NCCL (`OVERHEAD_BYTES` on a GPU).
"""

from __future__ import annotations

from typing import NamedTuple

from areal_rloo.config import Config
from areal_rloo.models.sizes import Sizes, chunk_logits

GIB = 2**30
OVERHEAD_BYTES = 2 * GIB  # of a process on a GPU
_FLASH_COPIES = 1.05  # flash attention keeps copies of its inputs: measured with a 1.5B model on an H200
STANDING = ("weights", "optimizer", "reference", "weights in bfloat16")  # parts of a rank that stay between two steps


def number_bytes(config: Config) -> int:
    """Return the bytes of a number in computations, in a broadcast and in an engine."""
    return 2 if config.model.dtype == "bfloat16" else 4


def trained_numbers(model: Sizes, config: Config) -> int:
    """Return the number of parameters with a gradient."""
    lora = config.learner.lora
    return model.num_parameters if lora is None else model.num_adapted(lora.rank, lora.targets)


class Broadcast(NamedTuple):
    """Bytes of the weights on their way."""

    whole: float
    bucket: float  # the longest
    neighbours: float  # two buckets after each other, as rank 0 has on a GPU


def broadcast_bytes(model: Sizes, config: Config) -> Broadcast:
    """Return the bytes of a broadcast of the weights, in the buckets of `weights/manifest.py`; zeros through shared
    memory."""
    if config.weights_transport(same_host=config.launcher.num_hosts == 1) == "shared_memory":
        return Broadcast(0.0, 0.0, 0.0)
    low, published = number_bytes(config), published_bytes(model, config)
    of_layer = max(config.weights.bucket_bytes, low * model.largest_of_layer)
    longest = max(of_layer, low * model.head)
    return Broadcast(*(float(min(published, size)) for size in (published, longest, longest + of_layer)))


def published_bytes(model: Sizes, config: Config) -> int:
    """Return the bytes of a version of the weights: adapters alone are float32."""
    if config.publishes_adapters:
        return 4 * trained_numbers(model, config)
    return number_bytes(config) * model.num_parameters


def activation_bytes(model: Sizes, config: Config, *, on_gpu: bool) -> float:
    """Estimate the bytes kept for the backward pass, per token of a microbatch."""
    hidden, low = model.hidden_size, number_bytes(config)
    layer = model.kept_bytes(bfloat16=low == 2)
    top = hidden * (4 + 4 + low) + 2 * 4 * hidden  # the last norm, and the gradient from the head
    if config.learner.gradient_checkpointing:
        return float(model.num_layers * 4 * hidden + layer + top)
    copies = _FLASH_COPIES if on_gpu and low == 2 else 1.0
    return float(model.num_layers * layer * copies + top)


def estimate(model: Sizes, config: Config, *, on_gpu: bool, num_trained: int | None = None) -> dict[str, float]:
    """Estimate the bytes of a rank by part, with full microbatches.

    The optimizer step works on a parameter at a time, which is no larger than the head or a layer. `num_trained` counts
    the parameters with a gradient over all ranks; None: as the sizes of the model say.
    """
    learner, num_parameters = config.learner, model.num_parameters
    num_trained = trained_numbers(model, config) if num_trained is None else num_trained
    ranks = learner.num_ranks // learner.num_replicas
    sharded = learner.num_ranks > 1 or learner.offload == "parameters"
    low = number_bytes(config)
    moments = 2 * (4 if learner.optimizer.state_dtype == "float32" else 2)
    reference = config.algorithm.kl.coefficient > 0 and config.model.reference is not None
    at_home = config.model.reference is not None and config.model.reference.offload
    away = on_gpu and learner.offload == "parameters"
    apart = away or (on_gpu and learner.offload == "optimizer")  # on a CPU, everything is in the same memory
    logits = (4 * model.head if learner.lora is None else 0) + _logit_bytes(model, config) * chunk_logits(on_gpu=on_gpu)
    by_nccl = on_gpu and config.rollout.device != "cpu"
    parts = {
        "weights": 0 if away else 4 * num_parameters / ranks,
        "gradients": 0 if away else 4 * num_trained / ranks,
        "optimizer": 0 if apart else moments * num_trained / ranks,
        "reference": 4 * num_parameters / ranks if reference and not at_home and not away else 0,
        "weights in bfloat16": 0 if sharded else _copies_bytes(model, config, logits),
        "whole layers": low * (2 * model.of_layer + model.outside) if sharded else 0,
        "activations": activation_bytes(model, config, on_gpu=on_gpu) * learner.microbatch_tokens,
        "logits": logits,
        "weights to send": broadcast_bytes(model, config).neighbours if by_nccl else 0,  # of rank 0
    }
    of_a_step = sum(parts[part] for part in ("weights in bfloat16", "whole layers", "activations", "logits"))
    if sharded and learner.lora is None:
        parts["gradients to reduce"] = max(0, _reduced(model, config, parts["activations"], on_gpu=on_gpu) - of_a_step)
    if not away:
        freed = of_a_step + parts.get("gradients to reduce", 0)
        largest = min(num_trained, max(model.head, model.of_layer)) / ranks
        copies = 8 if moments == 4 else 0  # float32, of moments in bfloat16
        parts["optimizer step"] = max(0, ((moments if apart else 0) + copies) * largest - freed)
    return {part: float(size) for part, size in parts.items() if size}


def _reduced(model: Sizes, config: Config, activations: float, *, on_gpu: bool) -> float:
    """Return the bytes beside a rank's shards while the gradients of a whole group of parameters are reduced.

    FSDP2 holds the group outside the layers to the end of the backward pass, and copies gradients into a float32
    buffer. Gloo copies the buffer again. Autograd still holds the last gradient, that of the embedding, if not tied.
    """
    low, ranks = number_bytes(config), config.learner.num_ranks // config.learner.num_replicas
    copies = 4 * (1 + 1 / ranks) + (4 if ranks > 1 and not on_gpu else 0)
    to_the_end = max(low + 4, copies) * model.outside + (0 if model.tied else low * model.head)
    before = low * (model.outside + 2 * model.head)  # weights, and gradients of embedding and head, also if tied
    layer = low * (model.outside + model.head) + (3 * low + copies) * model.of_layer + activations
    return max(to_the_end, before, layer)


def _copies_bytes(model: Sizes, config: Config, logits: float) -> float:
    """Return the bytes of the weights in bfloat16 at the peak, beside the logits.

    The backward pass needs the copies of all layers. With checkpointing, they are there until the logits come; of
    frozen weights only those of a layer and of the head.
    """
    if number_bytes(config) != 2:
        return 0.0
    if not config.learner.gradient_checkpointing:
        return 2.0 * model.num_parameters
    if config.learner.lora is not None:
        return 2 * (model.of_layer + model.head)
    return max(0.0, 2 * model.num_parameters - logits)


def in_words(parts: dict[str, float]) -> str:
    """Format an estimate, the largest part first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return " + ".join(f"{part} {size / GIB:.2f}" for part, size in ordered)


def in_gib(gpu_bytes: int) -> str:
    """Format the memory of a GPU, also in GB, as vendors write it and as configs may."""
    return f"{gpu_bytes / GIB:.1f} GiB ({gpu_bytes / 1e9:.0f} GB)"


def _logit_bytes(model: Sizes, config: Config) -> int:
    """Return the bytes for each logit of a chunk: the float32 buffers and products alive at the same time."""
    loss = config.algorithm.loss
    if not loss.of_tokens:  # autograd keeps more of a chunk, and more of an entropy with a gradient
        return 4 * (4 if loss.entropy_coefficient == 0 else 6)
    low = number_bytes(config) == 2
    capped = 0 if not model.logits_capped else 4 if low else 8  # the slope of the cap
    return 4 * 3 + (2 if low else 0) + capped
