"""Prompts into the cache, many at once and each from where it stands: packed, padded nowhere but in attention.

In: segments, each the next tokens of a row. Out: their keys and values in the arena, and nothing else; the last token
of a prompt is the first input of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.embedded.cache import Cache, CacheRow
from areal_rloo.engines.embedded.parameters import Architecture, Parameters
from areal_rloo.engines.embedded.transformer import after_attention, fused_heads, rotate
from areal_rloo.models.layout import PackedLayout

_SHORT_TOKENS = 128  # segments up to this are attended together, padded to the longest of them


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that follow the first `start` of a row: [num_tokens] int32, at least one."""

    row: CacheRow
    start: int
    tokens: npt.NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def short(self) -> bool:
        return self.start == 0 and len(self.tokens) <= _SHORT_TOKENS


def prefill(parameters: Parameters, cache: Cache, segments: Sequence[Segment], rope: Tensor) -> None:
    """Compute segments of different rows in one pass.

    Args:
        parameters: the weights.
        cache: holds what stands before each segment, and gets the segments.
        segments: at most one a row.
        rope: [2, context_tokens, head_dim] float32, cos and signed sin.
    """
    a, device = parameters.architecture, rope.device
    segments = sorted(segments, key=lambda segment: not segment.short)
    lengths = np.array([len(segment.tokens) for segment in segments])
    tokens = torch.from_numpy(np.concatenate([segment.tokens for segment in segments])).to(device)
    positions = np.concatenate([np.arange(segment.start, segment.end) for segment in segments])
    of_row = np.repeat(np.array([(segment.row.start, segment.row.capacity) for segment in segments]), lengths, axis=0)
    starts, capacities, at = torch.from_numpy(np.stack([of_row[:, 0], of_row[:, 1], positions])).to(device)
    places = cache.places(starts, capacities, at).flatten()
    cos, sin = rope.index_select(1, at).unsqueeze(2)
    attention = _Attention(a, cache, segments, device)
    rotated = a.num_heads + a.num_kv_heads
    hidden = F.embedding(tokens, parameters.embedding).float()
    for index, layer in enumerate(parameters.layers):
        heads = fused_heads(hidden, layer, parameters)
        heads = torch.cat([rotate(heads[:, :rotated], cos, sin), heads[:, rotated:]], dim=1)
        cache.tensor[index].index_copy_(0, places, heads[:, a.num_heads :].reshape(-1, a.head_dim))
        if index + 1 < a.num_layers:  # nobody asks for what comes after the last keys and values
            hidden = after_attention(hidden, attention(index, heads), layer, parameters)
    for segment in segments:
        cache.mark_written(segment.row, segment.end)


class _Attention:
    """Causal attention of each segment to its row: short new ones together, the others one by one."""

    def __init__(
        self, architecture: Architecture, cache: Cache, segments: Sequence[Segment], device: torch.device
    ) -> None:
        short = [len(segment.tokens) for segment in segments if segment.short]
        self._a = architecture
        self._cache = cache
        self._short = PackedLayout.of_lengths(short, device) if short else None
        self._num_short = sum(short)
        self._long = [
            (segment, None if segment.start == 0 else _visible(segment, device))
            for segment in segments
            if not segment.short
        ]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """[num_tokens, num_heads + 2 num_kv_heads, head_dim] to [num_tokens, num_heads * head_dim]."""
        a = self._a
        parts = [] if self._short is None else [self._together(self._short, heads)]
        begin = self._num_short
        for segment, visible in self._long:
            end = begin + len(segment.tokens)
            q = heads[begin:end, : a.num_heads].transpose(0, 1)
            k, v = self._cache.vectors(segment.row, segment.end)[layer]
            parts.append(self._attend(q[None], k[None], v[None], visible)[0])
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _together(self, layout: PackedLayout, heads: Tensor) -> Tensor:
        sizes = [self._a.num_heads, self._a.num_kv_heads, self._a.num_kv_heads]
        parts = []
        for block in layout.blocks:
            laid = heads.index_select(0, block.to_padded).unflatten(0, (block.num_sequences, block.longest))
            q, k, v = laid.transpose(1, 2).split(sizes, dim=1)
            parts.append(self._attend(q, k, v, None).flatten(0, 1))
        return torch.cat(parts).index_select(0, layout.to_packed)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """[num, num_heads, num_queries, head_dim] to [num, num_queries, num_heads * head_dim]."""
        grouped = self._a.num_heads != self._a.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)


def _visible(segment: Segment, device: torch.device) -> Tensor:
    """[num_tokens, end] bool: a token sees what stands before it, and itself."""
    q = torch.arange(segment.start, segment.end, device=device)
    return torch.arange(segment.end, device=device) <= q[:, None]
