"""Packed rows: where the sequences of a row are, and attention within each of them, without padding tokens.

A microbatch is a row of tokens, sequence after sequence, which only attention separates. On a GPU in half precision,
flash attention takes their start positions. Elsewhere, sequences of similar length are stacked into blocks, padded on
the right, where no token sees padding. Engines import this module, so it must not import transformers' models.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.models.capped_attention import capped_attention, visible_keys

_MOST_PADDING = 0.1  # share of a block's attention scores that padding may take; fewer blocks are fewer calls
_SHORT_TOKENS = 64  # for blocks as short as this, only the call costs time
_FLASH_HEAD = 256  # numbers of a head that the kernel takes
if torch.backends.cuda.is_built():  # only then used; the import loads torch.compile, which takes seconds
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_KNOWS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in every supported torch


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that attend together, padded to [num_sequences, longest]."""

    to_padded: Tensor  # [num_sequences * longest] int64, the token of the row at each padded place (0 at padding)
    num_sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a packed row are."""

    position_ids: Tensor  # [num_tokens] int64, place of each token within the sequence
    blocks: tuple[Block, ...]  # the sequences by length, each in exactly one block
    to_packed: Tensor  # [num_tokens] int64, place of each token of the row in the concatenated blocks
    starts: Tensor  # [num_sequences + 1] int32, start of each sequence in the row, and the end of the last
    longest: int  # tokens of the longest sequence

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Lay out sequences of these lengths one after another."""
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        blocks, places = [], torch.empty(int(size.sum()), dtype=torch.int64)
        offset = 0
        for members in _of_like_length(lengths):
            longest = lengths[members[0]]
            column = torch.arange(longest)
            real = column < size[members, None]
            tokens = start[members, None] + column
            blocks.append(Block(torch.where(real, tokens, 0).flatten().to(device), len(members), longest))
            places[tokens[real]] = offset + real.flatten().nonzero().squeeze(1)
            offset += real.numel()
        return cls(
            position_ids=(torch.arange(len(places)) - start.repeat_interleave(size)).to(device),
            blocks=tuple(blocks),
            to_packed=places.to(device),
            starts=torch.tensor([*start, len(places)], dtype=torch.int32).to(device),
            longest=max(lengths),
        )


def _of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices by length, the longest first; begin a new group before padding exceeds `_MOST_PADDING`."""
    blocks: list[list[int]] = []
    scores = padded = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[blocks[-1][0]] if blocks else 0
        padded += longest**2
        scores += lengths[index] ** 2
        if not blocks or (longest > _SHORT_TOKENS and padded - scores > _MOST_PADDING * padded):
            blocks.append([])
            scores = padded = lengths[index] ** 2
        blocks[-1].append(index)
    return blocks


def packed_attention(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **model_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence of a packed row; transformers calls this signature.

    `q` is [1, num_heads, num_tokens, head_dim], `k` and `v` are likewise with num_kv_heads. The mask is None, and the
    dropout 0: the logprobs of a policy must be a function of the weights. With a `sliding_window`, a token attends to
    itself and the tokens before, so many in all; a `softcap` c makes a score s c tanh(s / c). Returns [1, num_tokens,
    num_heads, head_dim], and None for the attention weights.
    """
    # A branch instead of an expression: under torch.compile an expression becomes a symbol, which SDPA rejects here.
    grouped = False
    if q.shape[1] != k.shape[1]:
        grouped = True
    assert attention_mask is None and dropout == 0.0, "packed attention takes no mask and no dropout"
    window = sliding_window if sliding_window is not None and sliding_window < packed.longest else None
    scores = _Scores(q.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, grouped)
    q, k, v = (rows[0].transpose(0, 1) for rows in (q, k, v))
    if q.is_cuda and v.dtype != torch.float32 and softcap is None and _flash_width(q, v) <= _FLASH_HEAD:
        return _flash(q.to(v.dtype), k.to(v.dtype), v, packed, scores)[None], None
    parts = [_padded(q, k, v, block, scores) for block in packed.blocks]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.index_select(0, packed.to_packed)[None], None


class _Scores(NamedTuple):
    """How a layer scores pairs of tokens."""

    scale: float
    window: int | None  # None also if every token sees its whole sequence
    softcap: float | None
    grouped: bool  # several query heads share keys and values


def _padded(q: Tensor, k: Tensor, v: Tensor, block: Block, scores: _Scores) -> Tensor:
    """Attend in a padded block: [num_sequences * longest, num_heads, head_dim] from tensors by token."""

    def laid(by_token: Tensor) -> Tensor:
        rows = by_token.index_select(0, block.to_padded)
        return rows.view(block.num_sequences, block.longest, *rows.shape[1:]).transpose(1, 2)

    q, k, v = laid(q), laid(k), laid(v)
    if scores.softcap is not None:
        out = capped_attention(q, k, v, scale=scores.scale, window=scores.window, cap=scores.softcap)
    else:
        visible = None if scores.window is None else visible_keys(range(block.longest), scores.window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=visible is None, scale=scores.scale, enable_gqa=scores.grouped
        )
    return out.transpose(1, 2).flatten(0, 1)


def _flash_width(q: Tensor, v: Tensor) -> int:
    """Return the size of a head for flash attention: equal for queries and values, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _flash(q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, scores: _Scores) -> Tensor:
    """Attend with flash attention: [num_tokens, num_heads, head_dim] of `v` from tensors by token.

    The kernel takes heads of equal size in queries, keys and values, a multiple of 8. Zeros behind the numbers of a
    head change no score, and give zeros behind the output.
    """
    head_dim, width = v.shape[-1], _flash_width(q, v)
    q, k, v = (rows if rows.shape[-1] == width else F.pad(rows, (0, width - rows.shape[-1])) for rows in (q, k, v))
    before = -1 if scores.window is None else scores.window - 1
    options: dict[str, Any] = {"scale": scores.scale, "window_size": (before, 0)}
    if _VARLEN_KNOWS_GQA:
        options["enable_gqa"] = scores.grouped
    elif scores.grouped:
        k, v = (rows.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
    bounds = (packed.starts, packed.starts, packed.longest, packed.longest)
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), *bounds, **options)
    assert isinstance(out, Tensor), "only the output was requested"
    return out if head_dim == width else out[..., :head_dim]
