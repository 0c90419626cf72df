"""Attention over packed sequences, plugged into any transformers model: no token is padded, and none sees another's.

A microbatch is one row of tokens, sequence after sequence. Linear layers, norms and the head see the row as it is.
Attention takes it apart again: on a GPU in half precision flash attention knows where each sequence begins; elsewhere
sequences of about one length are laid beneath each other, attend causally (padding is on their right, so no real token
can see it), and go back into the row.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from areal_rloo.models.layout import Block, PackedLayout

PACKED_ATTENTION = "areal_rloo_packed"

_VARLEN_KNOWS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in every torch we support


def packed_attention(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float,
    dropout: float = 0.0,
    **model_kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row; the signature is the one transformers calls.

    Args:
        module: the attention layer; says whether several heads share keys and values.
        q: [1, num_heads, num_tokens, head_dim].
        k, v: [1, num_kv_heads, num_tokens, head_dim].
        attention_mask: None; the layout says all there is to say.
        packed: the layout, passed through the model's keyword arguments.
        scaling: factor on the scores.
        dropout: 0; a policy's logprobs must be a function of its weights.
        model_kwargs: what else transformers hands to every attention function.

    Returns:
        [1, num_tokens, num_heads, head_dim], and None for the attention weights.
    """
    # An expression would be a symbol while a layer is compiled, and this argument takes none: a branch is decided.
    grouped = False
    if getattr(module, "num_key_value_groups", 1) != 1:
        grouped = True
    assert attention_mask is None, "packed attention takes no mask"
    assert dropout == 0.0, "packed attention takes no dropout"
    q, k, v = (rows[0].transpose(0, 1) for rows in (q, k, v))
    if q.is_cuda and v.dtype != torch.float32:
        return _flash(q.to(v.dtype), k.to(v.dtype), v, packed, scaling, grouped=grouped)[None], None
    parts = [_padded(q, k, v, block, scaling, grouped=grouped) for block in packed.blocks]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.index_select(0, packed.to_packed)[None], None


def _padded(q: Tensor, k: Tensor, v: Tensor, block: Block, scaling: float, *, grouped: bool) -> Tensor:
    """[num_sequences * longest, num_heads, head_dim]; tensors by token in."""

    def laid(by_token: Tensor) -> Tensor:
        rows = by_token.index_select(0, block.to_padded)
        return rows.view(block.num_sequences, block.longest, *rows.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(laid(q), laid(k), laid(v), is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, scaling: float, *, grouped: bool) -> Tensor:
    """[num_tokens, num_heads, head_dim] from tensors by token."""
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if _VARLEN_KNOWS_GQA:
        options["enable_gqa"] = grouped
    elif grouped:
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
    starts, longest = packed.starts, packed.longest
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), starts, starts, longest, longest, **options)
    assert isinstance(out, Tensor), "nothing else was asked for"
    return out


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
