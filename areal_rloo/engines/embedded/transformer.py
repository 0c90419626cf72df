"""The forward pass by hand: prompts into the cache, and one decode step for many rows.

Written for few operations: on a CPU the calls, not the arithmetic, are what a step costs. So what all layers share is
made once a step, biases and residuals ride on matrix products, and constants are tensors already.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.embedded.parameters import Architecture, Layer, Parameters


class Cache:
    """Keys and values of the running rows.

    Attributes:
        tensor: [num_layers, 2, num_rows, num_kv_heads, context_tokens, head_dim], keys and then values. Rows and heads
            lie so that a matrix product over a prefix of both reads them in place.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        num_rows: int,
        context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        a = architecture
        shape = (a.num_layers, 2, num_rows, a.num_kv_heads, context_tokens, a.head_dim)
        self.tensor = torch.zeros(shape, device=device, dtype=dtype)
        self._heads = self.tensor.flatten(2, 3)
        self._vectors = self.tensor.flatten(1, 4)
        starts = torch.arange(0, self._vectors.shape[1], context_tokens, device=device)
        self._starts = starts.view(2, num_rows, a.num_kv_heads).transpose(0, 1).flatten(1)

    def places(self, positions: Tensor) -> Tensor:
        """Where the vectors at these positions lie in a layer: [num_rows * 2 * num_kv_heads] int64, keys first."""
        return (self._starts[: len(positions)] + positions[:, None]).flatten()

    def write(self, layer: int, places: Tensor, vectors: Tensor) -> None:
        """Store [num_rows, 2 * num_kv_heads, head_dim]."""
        self._vectors[layer].index_copy_(0, places, vectors.flatten(0, 1))

    def read(self, num_heads: int, longest: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `num_heads` heads of all rows: [num_layers, num_heads, longest, head_dim]."""
        keys, values = self._heads[:, :, :num_heads, :longest].unbind(1)
        return keys, values


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
    parameters: Parameters, cache: Cache, tokens: Tensor, positions: Tensor, longest: int, rope: Tensor
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
    num, num_groups = len(tokens), len(tokens) * a.num_kv_heads
    cos, sin = _rotations(a, rope[:, positions])
    mask = torch.zeros(num, 1, longest, dtype=rope.dtype, device=rope.device)
    mask.masked_fill_((torch.arange(longest, device=rope.device) > positions[:, None]).unsqueeze(1), -torch.inf)
    mask = mask.repeat_interleave(a.num_kv_heads, 0) if a.num_kv_heads > 1 else mask
    places = cache.places(positions)
    all_keys, all_values = cache.read(num_groups, longest)
    hidden = F.embedding(tokens, parameters.embedding)
    for index, layer in enumerate(parameters.layers):
        heads = rotate(_heads(hidden, layer, parameters), cos, sin)
        cache.write(index, places, heads[:, a.num_heads :])
        q = heads[:, : a.num_heads].reshape(num_groups, -1, a.head_dim)
        scores = torch.baddbmm(mask, q, all_keys[index].transpose(1, 2))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        attended = torch.bmm(weights, all_values[index]).view(num, -1)
        hidden = _after_attention(hidden, attended, layer, parameters)
    return torch.mm(_normed(hidden, parameters.final_norm, parameters.norm_eps), parameters.head.t())


def _rotations(a: Architecture, rope: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for every head of a row, so that one rotation does for all.

    Queries are scaled by it too, and values are left as they are.
    """
    cos, sin = rope.unsqueeze(2)

    def for_every_head(table: Tensor, for_values: float) -> Tensor:
        q = (table * a.head_dim**-0.5).expand(-1, a.num_heads, -1)
        k = table.expand(-1, a.num_kv_heads, -1)
        return torch.cat([q, k, torch.full_like(k, for_values)], dim=1)

    return for_every_head(cos, 1.0), for_every_head(sin, 0.0)


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
        attended = attended.transpose(1, 2).reshape(num * length, -1)
        hidden = _after_attention(hidden.flatten(0, 1), attended, layer, parameters).view(num, length, -1)
    return torch.stack(caches)


def _normed(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """RMS norm over the last dimension, in float32; by hand it takes a third of F.rms_norm's time on a CPU."""
    wide = x.float()
    squares = (wide * wide).sum(dim=-1, keepdim=True)
    scale = torch.add(eps, squares, alpha=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def _heads(hidden: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """Queries, keys and values, normed where the architecture does it: [..., num_heads + 2 num_kv_heads, head_dim]."""
    a = parameters.architecture
    normed = _normed(hidden, layer.input_norm, parameters.norm_eps)
    heads: Tensor = F.linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, a.head_dim))
    if layer.qk_norm is None:
        return heads
    num_normed = a.num_heads + a.num_kv_heads
    qk = _normed(heads[..., :num_normed, :], layer.qk_norm, parameters.norm_eps)
    return torch.cat([qk, heads[..., num_normed:, :]], dim=-2)


def _after_attention(hidden: Tensor, attended: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """The rest of a layer: [num_tokens, hidden_size] in and out."""
    hidden = torch.addmm(hidden, attended, layer.output.t())
    if layer.output_bias is not None:
        hidden = hidden + layer.output_bias
    normed = _normed(hidden, layer.mlp_norm, parameters.norm_eps)
    gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down.t())
    return hidden if layer.down_bias is None else hidden + layer.down_bias
