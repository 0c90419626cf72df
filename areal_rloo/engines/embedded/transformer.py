"""The forward pass: `decode` makes a step for many rows, `prefill` computes many prompts at once.

`prefill` takes segments, each the next tokens of a row, and writes their keys and values to the arena. Segments are
packed; only attention uses padding. The last token of a prompt is not prefilled: it is the first input of decoding.

The code uses few operations: on a CPU the number of calls limits a small step, not the arithmetic. So tensors for all
layers are made once a step, the matrix products add residuals, and constants are tensors already. With
bfloat16 weights the residual stream, norms, rotations and logprobs are float32, as in the learner under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.embedded.cache import Cache, CacheRow
from areal_rloo.engines.embedded.families import Architecture
from areal_rloo.engines.embedded.parameters import Layer, Parameters, Projection
from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.capped_attention import capped_chunk, visible_keys
from areal_rloo.models.head import LogitForm, head_product

_SHORT_TOKENS = 128  # shorter segments attend together, padded to the longest
_CAPPED_TOKENS = 512  # whose scores with a cap are in memory at the same time

Attention = Callable[[int, Tensor, int | None], Tensor]
"""The attention of a layer with a window: maps queries, [num_rows * num_kv_heads, num_queries, head_dim], to the same
shape; `num_queries` queries share the keys of a head."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a decode step. A step updates all numbers in place."""

    tokens: Tensor  # [num_rows] int64, the last token of each row
    counters: Tensor  # int64, the numbers of the other fields one after another; each grows by 1 in a step
    positions: Tensor  # [num_rows] int64, the position of this token
    uniform_places: Tensor  # [num_rows] int64, the index of the row's next uniform number
    key_places: Tensor  # [num_rows * num_kv_heads] int64, the indices of this token's keys in a layer
    places: Tensor  # [num_rows * 2 * num_kv_heads] int64, the indices of the keys and values

    @classmethod
    def of(cls, tokens: Tensor, counters: Tensor) -> Rows:
        num = len(tokens)
        vectors = len(counters) - 2 * num
        return cls(tokens, counters, *counters.split([num, num, vectors // 3, vectors // 3 * 2]))


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens after the first `start` tokens of a row: [num_tokens] int32, at least 1."""

    row: CacheRow
    start: int
    tokens: npt.NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def short(self) -> bool:
        return self.start == 0 and len(self.tokens) <= _SHORT_TOKENS


class Rotations:
    """cos and sin for every head of a row, for a single rotation of all heads; values are not rotated."""

    def __init__(self, architecture: Architecture, rope: Tensor, *, num_rows: int) -> None:
        a = architecture
        shape = (num_rows, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
        self._tables = []
        for table in rope:
            for_heads = torch.stack([torch.ones(shape), torch.zeros(shape)]).to(rope.device)
            self._tables.append((table, for_heads, for_heads[:, :, : a.num_heads + a.num_kv_heads]))

    def at(self, positions: Tensor) -> list[tuple[Tensor, ...]]:
        """Return cos and signed sin by table, each [num_rows, num_heads + 2 num_kv_heads, head_dim] float32.

        The next call overwrites all.
        """
        num = len(positions)
        for table, _, rotated in self._tables:
            rotated[:, :num] = table.index_select(1, positions).unsqueeze(2)
        return [for_heads[:, :num].unbind() for _, for_heads, _ in self._tables]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding in Hugging Face's half-and-half layout, in float32.

    `heads` is [..., num_heads, head_dim]; cos and the signed sin broadcast to this shape.
    """
    wide = heads.float()
    return torch.addcmul(wide * cos, wide.roll(heads.shape[-1] // 2, -1), sin).to(heads.dtype)


def decode(parameters: Parameters, cache: Cache, rows: Rows, rotations: Rotations, attend: Attention) -> Tensor:
    """Write the keys and values of a token of each row; return the next logits, [num_rows, vocab_size]."""
    a = parameters.architecture
    tables = rotations.at(rows.positions)
    num = len(rows.tokens)
    hidden = _embedded(rows.tokens, parameters)
    for index, layer in enumerate(parameters.layers):
        heads = rotate(fused_heads(hidden, layer, parameters), *tables[layer.rotation])
        cache.tensor[index].index_copy_(0, rows.places, heads[:, a.num_heads :].reshape(-1, a.head_dim))
        q = heads[:, : a.num_heads].reshape(num * a.num_kv_heads, -1, a.head_dim)
        attended = attend(index, q, layer.window)
        hidden = after_attention(hidden, attended.reshape(num, -1), layer, parameters)
    return _logits(hidden, parameters)


def prefill(parameters: Parameters, cache: Cache, segments: Sequence[Segment], rope: Tensor) -> None:
    """Compute segments of different rows in one pass; `cache` holds the tokens before each segment.

    `rope`: [num_tables, 2, context_tokens, head_dim] float32, cos and signed sin.
    """
    a, device = parameters.architecture, rope.device
    segments = sorted(segments, key=lambda segment: not segment.short)
    lengths = np.array([len(segment.tokens) for segment in segments])
    tokens = torch.from_numpy(np.concatenate([segment.tokens for segment in segments])).to(device)
    positions = np.concatenate([np.arange(segment.start, segment.end) for segment in segments])
    of_row = np.repeat(np.array([(segment.row.start, segment.row.capacity) for segment in segments]), lengths, axis=0)
    starts, capacities, at = torch.from_numpy(np.stack([of_row[:, 0], of_row[:, 1], positions])).to(device)
    places = cache.places(starts, capacities, at).flatten()
    tables = [table.unbind() for table in rope.index_select(2, at).unsqueeze(3).unbind()]
    attention = _Attention(a, cache, segments, device)
    rotated = a.num_heads + a.num_kv_heads
    hidden = _embedded(tokens, parameters)
    for index, layer in enumerate(parameters.layers):
        heads = fused_heads(hidden, layer, parameters)
        heads = torch.cat([rotate(heads[:, :rotated], *tables[layer.rotation]), heads[:, rotated:]], dim=1)
        cache.tensor[index].index_copy_(0, places, heads[:, a.num_heads :].reshape(-1, a.head_dim))
        if index + 1 < a.num_layers:  # the last layer only needs keys and values
            hidden = after_attention(hidden, attention(index, heads), layer, parameters)
    for segment in segments:
        cache.mark_written(segment.row, segment.end)


class _Attention:
    """Causal attention of each segment to its row: short new segments together, other segments one by one."""

    def __init__(self, a: Architecture, cache: Cache, segments: Sequence[Segment], device: torch.device) -> None:
        short = [len(segment.tokens) for segment in segments if segment.short]
        self._architecture = a
        self._sizes = [a.num_heads, a.num_kv_heads, a.num_kv_heads]
        self._cache = cache
        self._short = PackedLayout.of_lengths(short, device) if short else None
        self._num_short = sum(short)
        self._long = [segment for segment in segments if not segment.short]
        bounds = {(segment.start, segment.end) for segment in self._long}
        if self._short is not None:
            bounds |= {(0, block.longest) for block in self._short.blocks}
        self._visible = {
            (start, end, window): _visible(start, end, window, device, masked=a.attention_cap is not None)
            for start, end in bounds
            for window in set(a.windows)
        }

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Map [num_tokens, num_heads + 2 num_kv_heads, head_dim] to [num_tokens, num_heads * head_dim]."""
        window = self._architecture.windows[layer]
        parts = [] if self._short is None else [self._together(self._short, heads, window)]
        begin = self._num_short
        for segment in self._long:
            end = begin + len(segment.tokens)
            q = heads[begin:end, : self._sizes[0]].transpose(0, 1)
            k, v = self._cache.vectors(segment.row, segment.end)[layer]
            visible = self._visible[segment.start, segment.end, window]
            parts.append(_attend(q[None], k[None], v[None], visible, self._architecture)[0])
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _together(self, layout: PackedLayout, heads: Tensor, window: int | None) -> Tensor:
        parts = []
        for block in layout.blocks:
            laid = heads.index_select(0, block.to_padded).unflatten(0, (block.num_sequences, block.longest))
            q, k, v = laid.transpose(1, 2).split(self._sizes, dim=1)
            visible = self._visible[0, block.longest, window]
            parts.append(_attend(q, k, v, visible, self._architecture).flatten(0, 1))
        return torch.cat(parts).index_select(0, layout.to_packed)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, a: Architecture) -> Tensor:
    """Map [num, num_heads, num_queries, head_dim] to [num, num_queries, num_heads * head_dim]."""
    scale, shared = a.attention_scale, a.num_heads // a.num_kv_heads
    if a.attention_cap is not None:
        assert visible is not None, "scores with a cap need a mask"
        parts = zip(q.split(_CAPPED_TOKENS, dim=2), visible.split(_CAPPED_TOKENS), strict=True)
        out = torch.cat([capped_chunk(part, k, v, seen, scale, a.attention_cap) for part, seen in parts], dim=2)
    elif visible is None or shared == 1:
        causal = visible is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=shared > 1
        )
    else:
        # The fused kernels of a GPU take a mask, or fewer heads of keys than of queries, but not both. Without them,
        # all scores of a chunk would be in memory. So the heads with common keys become a batch.
        by_group = q.unflatten(1, (a.num_kv_heads, shared)).flatten(0, 1)
        k, v = (rows.flatten(0, 1).unsqueeze(1).expand(-1, shared, -1, -1) for rows in (k, v))
        out = F.scaled_dot_product_attention(by_group, k, v, attn_mask=visible, scale=scale).reshape(q.shape)
    return out.transpose(1, 2).flatten(2)


def _visible(start: int, end: int, window: int | None, device: torch.device, *, masked: bool) -> Tensor | None:
    """Return the mask [end - start, end] bool: a token attends to itself and to the tokens before, in its window.

    None if the attention is causal without a mask, unless `masked`.
    """
    if (window is None or window >= end) and start == 0 and not masked:
        return None
    return visible_keys(range(start, end), window, device)


def _embedded(tokens: Tensor, parameters: Parameters) -> Tensor:
    """Return the embeddings of tokens, [num_tokens, hidden_size] float32."""
    hidden, scale = F.embedding(tokens, parameters.embedding).float(), parameters.architecture.embedding_scale
    return hidden if scale == 1 else hidden * scale


def _logits(hidden: Tensor, parameters: Parameters) -> Tensor:
    """Map [num_tokens, hidden_size] float32 to [num_tokens, vocab_size]."""
    a = parameters.architecture
    products = head_product(_input(hidden, parameters.final_norm, parameters), parameters.head)
    return LogitForm(scale=a.logit_scale, cap=a.logit_cap).logits(products)


def normed(x: Tensor, weight: Tensor, parameters: Parameters) -> Tensor:
    """Compute the RMS norm over the last dimension, float32; on a CPU in a third of F.rms_norm's time."""
    wide = x.float()
    if wide.is_cuda:  # few kernels count there
        return F.rms_norm(wide, wide.shape[-1:], eps=parameters.architecture.norm_eps).mul_(weight)
    squares = (wide * wide).sum(dim=-1, keepdim=True)
    scale = torch.add(parameters.norm_eps, squares, alpha=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(weight)


def fused_heads(hidden: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """Return queries, keys and values, with the architecture's norms: [..., num_heads + 2 num_kv_heads, head_dim]."""
    a = parameters.architecture
    x = _input(hidden, layer.attention_input_norm, parameters)
    heads: Tensor = _product(x, layer.qkv).unflatten(-1, (-1, a.head_dim))
    if layer.qk_norm is None:
        return heads
    qk, values = heads.split([a.num_heads + a.num_kv_heads, a.num_kv_heads], dim=-2)
    if a.qk_norm == "heads":
        return torch.cat([normed(qk, layer.qk_norm, parameters).to(heads.dtype), values], dim=-2)
    sizes = [a.num_heads, a.num_kv_heads]
    parts = [
        normed(part.flatten(-2), weight.flatten(), parameters).view(part.shape).to(heads.dtype)
        for part, weight in zip(qk.split(sizes, dim=-2), layer.qk_norm.split(sizes), strict=True)
    ]
    return torch.cat([*parts, values], dim=-2)


def after_attention(hidden: Tensor, attended: Tensor, layer: Layer, parameters: Parameters) -> Tensor:
    """Compute the rest of a layer: [num_tokens, hidden_size] float32 to the same shape."""
    hidden = _added(hidden, attended, layer.output, layer.attention_output_norm, parameters)
    x = _input(hidden, layer.mlp_input_norm, parameters)
    gate, up = _product(x, layer.gate_up).chunk(2, dim=-1)
    return _added(
        hidden, parameters.architecture.activation(gate).mul_(up), layer.down, layer.mlp_output_norm, parameters
    )


def _input(hidden: Tensor, norm: Tensor | None, parameters: Parameters) -> Tensor:
    """Return the input of a product: the hidden states, after a norm if there is any, in the dtype of the weights."""
    x = hidden if norm is None else normed(hidden, norm, parameters)
    return x.to(parameters.embedding.dtype)


def _product(x: Tensor, projection: Projection) -> Tensor:
    """Map [num_tokens, in] to [num_tokens, out]."""
    product: Tensor = F.linear(x, projection.weight, projection.bias)
    if projection.adapter is not None:
        product.addmm_(F.linear(x, projection.adapter.down), projection.adapter.up.t())
    return product


def _added(hidden: Tensor, x: Tensor, projection: Projection, norm: Tensor | None, parameters: Parameters) -> Tensor:
    """Add the projection of x, after a norm if there is any, to the hidden states."""
    scale, bias = parameters.architecture.residual_scale, projection.bias
    if projection.weight.dtype == torch.float32 and projection.adapter is None and norm is None:
        hidden = torch.addmm(hidden, x, projection.weight.t(), alpha=scale)
        return hidden if bias is None else hidden.add_(bias, alpha=scale)
    product = _product(x, projection)
    return torch.add(hidden, product if norm is None else normed(product, norm, parameters), alpha=scale)
