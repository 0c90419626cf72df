"""The forward pass by hand: one decode step for many rows, and the layers that prefill shares with it.

Written for few operations: on a CPU the calls, not the arithmetic, are what a step costs. So what all layers share is
made once a step, residuals ride on matrix products, and constants are tensors already. With bfloat16 weights the
residual stream, norms, rotations and logprobs are float32, as they are in the learner under autocast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.embedded.cache import Block, Cache
from areal_rloo.engines.embedded.parameters import Architecture, Layer, Parameters


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a decode step, in the order of the cache's blocks; a step moves all its numbers on in place.

    Attributes:
        blocks: where they lie.
        longest: of each block, 1 + the largest position.
        tokens: [num_rows] int64, the last token of each row.
        positions: [num_rows] int64, the place of that token.
        places: [num_rows * 2 * num_kv_heads] int64, where its keys and values go.
        key_places: [num_rows * num_kv_heads] int64, those of the keys.
    """

    blocks: list[Block]
    longest: list[int]
    tokens: Tensor
    positions: Tensor
    places: Tensor
    key_places: Tensor


class Rotations:
    """cos and sin for every head of a row, so that one rotation does for all; values are left as they are."""

    def __init__(self, architecture: Architecture, rope: Tensor, *, num_rows: int) -> None:
        a = architecture
        shape = (num_rows, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        self._rope = rope
        self._for_heads = torch.stack([torch.ones(shape), torch.zeros(shape)]).to(rope.device)
        self._rotated = self._for_heads[:, :, : a.num_heads + a.num_kv_heads]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [num_rows, num_heads + 2 num_kv_heads, head_dim] float32, until the next call."""
        num = len(positions)
        self._rotated[:, :num] = self._rope.index_select(1, positions).unsqueeze(2)
        cos, sin = self._for_heads[:, :num].unbind()
        return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-and-half layout, in float32; `sin` is `signed`.

    Args:
        heads: [..., num_heads, head_dim].
        cos, sin: broadcastable to it.
    """
    wide = heads.float()
    return torch.addcmul(wide * cos, wide.roll(heads.shape[-1] // 2, -1), sin).to(heads.dtype)


def signed(sin: Tensor) -> Tensor:
    """Negate the first half, so that `rotate` needs a roll and no negation."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)


def decode(parameters: Parameters, cache: Cache, rows: Rows, rotations: Rotations) -> Tensor:
    """One token a row: writes its keys and values, and gives the logits of the next, [num_rows, vocab_size]."""
    a = parameters.architecture
    cos, sin = rotations.at(rows.positions)
    cache.mask.index_fill_(0, rows.key_places, 0)
    num = len(rows.tokens)
    reads = [_BlockRead(cache, block, longest) for block, longest in zip(rows.blocks, rows.longest, strict=True)]
    hidden = F.embedding(rows.tokens, parameters.embedding).float()
    for index, layer in enumerate(parameters.layers):
        heads = rotate(fused_heads(hidden, layer, parameters), cos, sin)
        cache.tensor[index].index_copy_(0, rows.places, heads[:, a.num_heads :].reshape(-1, a.head_dim))
        q = heads[:, : a.num_heads].reshape(num * a.num_kv_heads, -1, a.head_dim)
        if len(reads) == 1:
            attended = reads[0].attend(index, q)
        else:
            parts = zip(reads, q.split([read.num_heads for read in reads]), strict=True)
            attended = torch.cat([read.attend(index, part) for read, part in parts])
        hidden = after_attention(hidden, attended.reshape(num, -1), layer, parameters)
    last = normed(hidden, parameters.final_norm, parameters.norm_eps).to(parameters.head.dtype)
    return torch.mm(last, parameters.head.t())


class _BlockRead:
    """Attention of the rows of one block, for all layers of one step."""

    def __init__(self, cache: Cache, block: Block, longest: int) -> None:
        keys, values, self._mask = cache.read(block, longest)
        self.num_heads = keys.shape[1]
        self._keys, self._values = keys.transpose(2, 3).unbind(), values.unbind()
        self._scale = cache.head_dim**-0.5

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """[num_heads, num_queries, head_dim] in and out, where `num_queries` are those that share a head's keys."""
        keys, values = self._keys[layer], self._values[layer]
        if q.dtype == torch.float32:  # a fifth faster on a CPU than the fused function
            weights = torch.softmax(torch.baddbmm(self._mask, q, keys, alpha=self._scale), dim=-1)
            return torch.bmm(weights, values)
        # Scores in bfloat16 would be off by 2^-9 of themselves; the fused function has them in float32.
        out = F.scaled_dot_product_attention(
            q[None], keys.transpose(1, 2)[None], values[None], attn_mask=self._mask[None], scale=self._scale
        )
        return out[0]


def normed(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """RMS norm over the last dimension, float32; by hand it takes a third of F.rms_norm's time on a CPU."""
    wide = x.float()
    squares = (wide * wide).sum(dim=-1, keepdim=True)
    scale = torch.add(eps, squares, alpha=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(weight)


def fused_heads(hidden: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """Queries, keys and values, normed where the architecture does it: [..., num_heads + 2 num_kv_heads, head_dim]."""
    a = parameters.architecture
    x = normed(hidden, layer.input_norm, parameters.norm_eps).to(layer.qkv.dtype)
    heads: Tensor = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, a.head_dim))
    if layer.qk_norm is None:
        return heads
    num_normed = a.num_heads + a.num_kv_heads
    qk = normed(heads[..., :num_normed, :], layer.qk_norm, parameters.norm_eps).to(heads.dtype)
    return torch.cat([qk, heads[..., num_normed:, :]], dim=-2)


def after_attention(hidden: Tensor, attended: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """The rest of a layer: [num_tokens, hidden_size] float32 in and out."""
    hidden = _added(hidden, attended, layer.output, layer.output_bias)
    x = normed(hidden, layer.mlp_norm, parameters.norm_eps).to(layer.gate_up.dtype)
    gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return _added(hidden, F.silu(gate).mul_(up), layer.down, layer.down_bias)


def _added(hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dtype == torch.float32:
        hidden = torch.addmm(hidden, x, weight.t())
        return hidden if bias is None else hidden + bias
    return hidden + F.linear(x, weight, bias)
