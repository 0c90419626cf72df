"""How much arithmetic a train step is, and how much of what the device could do in that time (MFU, arXiv:2204.02311).

Counted is what the mathematics asks for, forward and backward of the tokens trained on: not what is computed again to
save memory, and not the forward passes of proximal and reference logprobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from areal_rloo.models.layout import head_dim

# Dense bfloat16 FLOP/s of data sheets, by what the device calls itself; the first that fits counts.
_PEAK_FLOPS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("4090", 165e12),
    ("MI300X", 1307e12),
)


def train_flops(
    config: PreTrainedConfig, lengths: Sequence[int], num_targets: Sequence[int], *, frozen: bool = False
) -> float:
    """Floating-point operations of a forward and backward over sequences: three times those of the forward.

    Args:
        config: of the model.
        lengths: tokens of each sequence.
        num_targets: of each, how many places reach the head.
        frozen: whether the weights have no gradient, as under adapters (whose own products are not counted).
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = config.hidden_size * head_dim(config) * (2 * heads + 2 * kv_heads)
    layer = projections + 3 * config.hidden_size * config.intermediate_size
    scores = sum(length * (length + 1) // 2 for length in lengths)  # a token sees those before it, and itself
    attention = 2 * heads * head_dim(config) * scores  # with keys, and with values
    head = config.vocab_size * config.hidden_size * sum(num_targets)
    weights = config.num_hidden_layers * layer * sum(lengths) + head
    return float((4 if frozen else 6) * weights + 6 * config.num_hidden_layers * attention)


def peak_flops(device: torch.device, *, configured: float | None, dtype: str) -> float:
    """FLOP/s of a rank's device: as configured, or of its data sheet; NaN where neither is known."""
    if configured is not None:
        return configured
    if device.type != "cuda" or dtype != "bfloat16":
        return math.nan
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS if part in name), math.nan)
