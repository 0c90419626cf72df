"""Attention of a decode step: a query of each row to the keys of this row, in the arena of the cache.

`BlockAttention` makes batched products, a block of rows at a time. `RowAttention` makes one call of flash attention for
all rows; their places and lengths are numbers on the device, so a recorded step serves any rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.embedded.cache import Block, Cache
from areal_rloo.engines.embedded.families import Architecture
from areal_rloo.engines.embedded.transformer import Rows
from areal_rloo.models.capped_attention import attend_capped
from areal_rloo.models.device import FLASH_GENERATION

_FLASH_HEAD = 256  # numbers of a head, at most
_MOST_SEQUENCES = 65_535  # of a call: a dimension of CUDA's grid


class BlockAttention:
    """Attention of the rows of all blocks, for all layers of a step, also to the keys that the step writes."""

    def __init__(
        self, cache: Cache, blocks: Sequence[Block], longest: Sequence[int], rows: Rows, a: Architecture
    ) -> None:
        """`longest`: of each block, 1 + the largest position."""
        cache.mask.index_fill_(0, rows.key_places, 0)
        self._reads = [_BlockRead(cache, block, most, a) for block, most in zip(blocks, longest, strict=True)]
        if any(a.windows):
            for read, at in zip(self._reads, rows.positions.split([len(block) for block in blocks]), strict=True):
                read.limit(at, a)

    def __call__(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """Map [num_rows * num_kv_heads, num_queries, head_dim] to the same shape."""
        if len(self._reads) == 1:
            return self._reads[0].attend(layer, q, window)
        parts = zip(self._reads, q.split([read.num_heads for read in self._reads]), strict=True)
        return torch.cat([read.attend(layer, part, window) for read, part in parts])


class _BlockRead:
    """Attention of the rows of a block."""

    def __init__(self, cache: Cache, block: Block, longest: int, architecture: Architecture) -> None:
        keys, values, mask = cache.read(block, longest)
        self.num_heads = keys.shape[1]
        self._keys, self._values = keys.transpose(2, 3).unbind(), values.unbind()
        self._masks: dict[int | None, Tensor] = {None: mask}  # by window
        self._scale, self._cap = architecture.attention_scale, architecture.attention_cap

    def limit(self, positions: Tensor, architecture: Architecture) -> None:
        """Make the masks of windows; `positions` are those of the queries, [num_rows] int64."""
        written = self._masks[None]
        keys = torch.arange(written.shape[-1], device=positions.device)
        behind = (positions[:, None] - keys).repeat_interleave(architecture.num_kv_heads, dim=0)[:, None]
        for window in filter(None, set(architecture.windows)):
            limited = window < written.shape[-1]
            self._masks[window] = written.masked_fill(behind >= window, -torch.inf) if limited else written

    def attend(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """Map [num_heads, num_queries, head_dim] to the same shape; `num_queries` queries share the keys of a head."""
        keys, values, mask = self._keys[layer], self._values[layer], self._masks[window]
        if self._cap is not None:
            return attend_capped(q, keys, values, mask, scale=self._scale, cap=self._cap)
        if q.dtype == torch.float32:  # 20 % faster on a CPU than the fused function
            weights = torch.softmax(torch.baddbmm(mask, q, keys, alpha=self._scale), dim=-1)
            return torch.bmm(weights, values)
        # Scores in bfloat16 have a relative error of 2^-9; the fused function keeps scores in float32.
        out = F.scaled_dot_product_attention(
            q[None], keys.transpose(1, 2)[None], values[None], attn_mask=mask[None], scale=self._scale
        )
        return out[0]


class RowAttention:
    """Attention of all rows, wherever they are in the arena."""

    def __init__(self, cache: Cache, starts: Tensor, positions: Tensor, architecture: Architecture) -> None:
        """`starts`: [num_rows * num_kv_heads + 1] int32, the place of the first key of each head; the last is unused.

        `positions` are those of the queries, [num_rows] int64.
        """
        num_heads = len(starts) - 1
        self._cache, self._starts, self._scale = cache, starts, architecture.attention_scale
        self._lengths = (positions + 1).int().repeat_interleave(cache.num_kv_heads, output_size=num_heads)

    @staticmethod
    def serves(architecture: Architecture, *, num_rows: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether flash attention computes so many rows of this architecture on this device."""
        a = architecture
        return (
            device.type == "cuda"
            and torch.version.hip is None
            and num_rows * a.num_kv_heads <= _MOST_SEQUENCES
            and torch.cuda.get_device_capability(device)[0] >= FLASH_GENERATION
            and dtype != torch.float32
            and a.attention_cap is None
            and a.head_dim % 8 == 0
            and a.head_dim <= _FLASH_HEAD
        )

    def __call__(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """Map [num_rows * num_kv_heads, num_queries, head_dim] to the same shape."""
        keys, values = self._cache.halves(layer)
        return flash_rows(q, keys, values, self._starts, self._lengths, self._cache.capacities[-1], self._scale, window)


def flash_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend from queries [num, num_queries, head_dim] to `lengths` keys each, from `starts` on; the same shape.

    `keys` and `values` are [num_vectors, head_dim]. The queries of a row share its keys. torch has no public function
    for sequences with gaps between them.
    """
    q_starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    limits: dict[str, Any] = {}
    if window is not None and window < longest:  # with limits, rows that share keys read them more than once
        limits = {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, keys.unsqueeze(1), values.unsqueeze(1), q_starts, starts, 1, longest, 0.0, False, False),
        scale=scale,
        seqused_k=lengths,
        **limits,
    )[0]
    return out
