"""Where the sequences of a packed row lie. Imported by engines too, and so without what transformers has of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MOST_PADDING = 0.1  # of the attention of a block may be padding's; fewer blocks are fewer calls
_SHORT_TOKENS = 64  # a block as short as this costs its call and nothing else


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that attend together, padded to the longest of them.

    Attributes:
        to_padded: [num_sequences * longest] int64: which token of the row stands at each padded place (0 at padding).
        num_sequences: rows of the padded form.
        longest: columns of the padded form.
    """

    to_padded: Tensor
    num_sequences: int
    longest: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a packed row lie.

    Attributes:
        position_ids: [num_tokens] int64: each token's place within its sequence.
        blocks: the sequences by length, each in one of these.
        to_packed: [num_tokens] int64: where each token of the row stands in the blocks, one behind the other.
        starts: [num_sequences + 1] int32: where each sequence begins in the row, and where the last one ends.
        longest: tokens of the longest sequence.
    """

    position_ids: Tensor
    blocks: tuple[Block, ...]
    to_packed: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Sequences of these lengths, one behind the other."""
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
    """Indices by length, the longest first, cut where padding would cost more than `_MOST_PADDING` of the scores."""
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


def head_dim(config: PreTrainedConfig) -> int:
    """Of a model that says it, or whose heads share the hidden size."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
