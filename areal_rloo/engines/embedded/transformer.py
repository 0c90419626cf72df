"""The forward pass by hand: prompts into the cache, and one decode step for many rows.

The cache is one tensor [num_layers, 2, num_rows, num_kv_heads, context_tokens, head_dim], keys and then values: rows
and heads lie so that a matrix product over a prefix of both reads them in place. Written for few, large operations: on
a CPU the calls, not the arithmetic, are what a step costs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.embedded.parameters import Layer, Parameters


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-and-half layout; `sin` has its first half negated already.

    Args:
        heads: [..., num_heads, head_dim].
        cos, sin: broadcastable to it.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def signed(sin: Tensor) -> Tensor:
    """Negate the first half, so that `rotate` needs a roll and no negation."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)


def decode(
    parameters: Parameters, cache: Tensor, tokens: Tensor, positions: Tensor, longest: int, rope: Tensor
) -> Tensor:
    """One token a row: writes its keys and values, and gives the logits of the next.

    Args:
        parameters: the weights.
        cache: its first num_rows rows are read and written.
        tokens: [num_rows] int64, the last token of each row.
        positions: [num_rows] int64, the place of that token.
        longest: 1 + the largest position.
        rope: [2, context_tokens, head_dim], cos and signed sin.

    Returns:
        [num_rows, vocab_size] in the weights' dtype.
    """
    a = parameters.architecture
    num = len(tokens)
    row = torch.arange(num, device=tokens.device)
    cos, sin = rope[:, positions].unsqueeze(2)
    beyond = torch.arange(longest, device=tokens.device) > positions[:, None]
    mask = torch.zeros(num, longest, dtype=cache.dtype, device=cache.device).masked_fill_(beyond, -torch.inf)
    mask = mask[:, None, None]
    hidden = F.embedding(tokens, parameters.embedding)
    rotated = a.num_heads + a.num_kv_heads
    for layer, layer_cache in zip(parameters.layers, cache, strict=True):
        heads = _heads(hidden, layer, parameters)
        qk = rotate(heads[:, :rotated], cos, sin)
        q, k, v = qk[:, : a.num_heads], qk[:, a.num_heads :], heads[:, rotated:]
        layer_cache[:, row, :, positions] = torch.stack([k, v], dim=1)
        keys, values = layer_cache[:, :num, :, :longest]
        q = q.view(num, a.num_kv_heads, a.num_heads // a.num_kv_heads, a.head_dim) * a.head_dim**-0.5
        scores = torch.softmax(torch.matmul(q, keys.transpose(-1, -2)) + mask, dim=-1, dtype=torch.float32)
        attended = torch.matmul(scores.to(values.dtype), values).reshape(num, -1)
        hidden = _after_attention(hidden, attended, layer, parameters)
    hidden = _normed(hidden, parameters.final_norm, a.norm_eps)
    return hidden @ parameters.head.T


def prefill(parameters: Parameters, tokens: Tensor, rope: Tensor) -> Tensor:
    """Keys and values of prompts, right-padded to one length; what stands at padding is never attended to.

    Args:
        parameters: the weights.
        tokens: [num_prompts, num_tokens] int64.
        rope: [2, context_tokens, head_dim].

    Returns:
        [num_layers, 2, num_prompts, num_kv_heads, num_tokens, head_dim].
    """
    a = parameters.architecture
    num, length = tokens.shape
    cos, sin = rope[:, :length].unsqueeze(2)
    hidden = F.embedding(tokens, parameters.embedding)
    rotated = a.num_heads + a.num_kv_heads
    caches = []
    for layer in parameters.layers:
        heads = _heads(hidden, layer, parameters)
        qk = rotate(heads[:, :, :rotated], cos, sin).transpose(1, 2)
        q, k, v = qk[:, : a.num_heads], qk[:, a.num_heads :], heads[:, :, rotated:].transpose(1, 2)
        caches.append(torch.stack([k, v]))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=a.num_heads != a.num_kv_heads)
        attended = attended.transpose(1, 2).reshape(num, length, -1)
        hidden = _after_attention(hidden, attended, layer, parameters)
    return torch.stack(caches)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, in float32; by hand it takes a third of F.rms_norm's time on a CPU."""
    wide = x.float()
    scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def _heads(hidden: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """Queries, keys and values, normed where the architecture does it: [..., num_heads + 2 num_kv_heads, head_dim]."""
    a = parameters.architecture
    normed = _normed(hidden, layer.input_norm, a.norm_eps)
    heads: Tensor = F.linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, a.head_dim))
    if layer.qk_norm is None:
        return heads
    num_normed = a.num_heads + a.num_kv_heads
    qk = _normed(heads[..., :num_normed, :], layer.qk_norm, a.norm_eps)
    return torch.cat([qk, heads[..., num_normed:, :]], dim=-2)


def _after_attention(hidden: Tensor, attended: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    a = parameters.architecture
    hidden = hidden + F.linear(attended, layer.output, layer.output_bias)
    normed = _normed(hidden, layer.mlp_norm, a.norm_eps)
    gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer.down)
