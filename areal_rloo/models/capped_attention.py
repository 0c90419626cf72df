"""Attention with capped scores (Gemma 2, arXiv:2408.00118, section 2), for which torch has no fused function."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_SCORES = 2**24  # scores in memory at the same time: 64 MiB of float32, a few times


def visible_keys(places: range, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the tokens at these places see, [num_places, places.stop] bool: causal, within the window."""
    keys = torch.arange(places.stop, device=device)
    behind = keys[places.start :, None] - keys
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, cap: float) -> Tensor:
    """Attend causally with scores cap tanh(scale q k / cap), a chunk of scores at a time, recomputed in backward.

    Maps [num_sequences, num_heads, longest, head_dim] to the same shape; `k` and `v` may have fewer heads.
    """
    num, num_heads, longest = q.shape[:3]
    chunk = max(1, _CHUNK_SCORES // (num * num_heads * longest))
    parts = []
    for start in range(0, longest, chunk):
        places = range(start, min(start + chunk, longest))
        visible = visible_keys(places, window, q.device)
        q_part, k_part, v_part = q[:, :, start : places.stop], k[:, :, : places.stop], v[:, :, : places.stop]
        part: Tensor = checkpoint(_chunk, q_part, k_part, v_part, visible, scale, cap, use_reentrant=False)
        parts.append(part)
    return torch.cat(parts, dim=2)


def _chunk(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float) -> Tensor:
    """Compute scores in float32 at least, as in an engine's fused function: bfloat16 would round 50 by up to 0.1."""
    if q.shape[1] != k.shape[1]:
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
    wide = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        products = q.to(wide) @ k.to(wide).transpose(2, 3)
    scores = cap * torch.tanh(products * (scale / cap))
    return scores.masked_fill(~visible, -math.inf).softmax(-1).to(v.dtype) @ v
