"""Attention over packed sequences, plugged into any transformers model: nothing is padded but attention itself.

A microbatch is one row of tokens, sequence after sequence. Linear layers, norms and the head see the row as it is.
Attention pads inside: it lays each sequence in a row of its own, attends causally (padding is on the right, so no real
token can see it), and puts the results back into the row. One code path for CPU and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

PACKED_ATTENTION = "areal_rloo_packed"


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a packed row lie.

    Attributes:
        to_padded: [num_sequences * longest] int64: which token of the row stands at each padded place (0 at padding).
        to_packed: [num_tokens] int64: at which padded place each token of the row stands.
        position_ids: [num_tokens] int64: each token's place within its sequence.
        num_sequences: rows of the padded form.
        longest: columns of the padded form.
    """

    to_padded: Tensor
    to_packed: Tensor
    position_ids: Tensor
    num_sequences: int
    longest: int

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> PackedLayout:
        """Sequences of these lengths, one behind the other."""
        longest = max(lengths)
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        column = torch.arange(longest)
        real = column < size[:, None]
        to_padded = torch.where(real, start[:, None] + column, 0)
        return cls(
            to_padded=to_padded.flatten().to(device),
            to_packed=real.flatten().nonzero().squeeze(1).to(device),
            position_ids=column.expand(len(lengths), longest)[real].to(device),
            num_sequences=len(lengths),
            longest=longest,
        )


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
        module: the attention layer; only its class is of interest to transformers.
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
    assert attention_mask is None, "packed attention takes no mask"
    assert dropout == 0.0, "packed attention takes no dropout"

    def padded(rows: Tensor) -> Tensor:
        by_token = rows[0].transpose(0, 1)
        laid = by_token.index_select(0, packed.to_padded)
        return laid.view(packed.num_sequences, packed.longest, *laid.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        padded(q), padded(k), padded(v), is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    by_token = out.transpose(1, 2).reshape(packed.num_sequences * packed.longest, *q.shape[1::2])
    return by_token.index_select(0, packed.to_packed)[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
