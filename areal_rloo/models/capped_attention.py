"""Attention with capped scores (Gemma 2, arXiv:2408.00118, section 2), for which torch has no fused function."""

from __future__ import annotations

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
        part: Tensor = checkpoint(capped_chunk, q_part, k_part, v_part, visible, scale, cap, use_reentrant=False)
        parts.append(part)
    return torch.cat(parts, dim=2)


def capped_chunk(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, cap: float) -> Tensor:
    """Map [num_sequences, num_heads, num_queries, head_dim] to the same shape; `k` and `v` may have fewer heads.

    `visible` is [num_queries, num_keys] bool.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
    mask = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, -torch.inf)
    return attend_capped(q, k.transpose(2, 3), v, mask, scale=scale, cap=cap)


def attend_capped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float, cap: float) -> Tensor:
    """Attend with scores cap tanh(scale q k / cap) + mask, all in memory; learner and embedded engine use the same.

    `q` is [..., num_queries, head_dim], `keys` [..., head_dim, num_keys], `values` [..., num_keys, head_dim]; the mask
    broadcasts to [..., num_queries, num_keys]. Scores are float32 at least, as in an engine's fused function: bfloat16
    would round a score of 50 by up to 0.1.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        products = q.to(wide) @ keys.to(wide)
    scores = cap * torch.tanh(products * (scale / cap))
    return torch.softmax(scores + mask, dim=-1).to(values.dtype) @ values
