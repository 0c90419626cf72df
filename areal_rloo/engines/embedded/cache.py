"""The keys and values of all rows in one arena, so that memory bounds tokens and not rows.

A row has a capacity: the longest context halved a few times. A row that is full moves to the next capacity, one copy of
what it holds. Rows lie without gaps, largest capacities first, and within one by kind:

    [640 running][640 pinned][640 prefilled][640 kept][320 running][320 pinned] ... [160 prefilled][160 kept] free

So the rows of one kind and capacity are one block, which a batched matrix product reads in place and only as far as its
longest row. To make or fill a gap, each block behind it moves as many rows as the gap holds from its one end to its
other; every capacity divides the larger ones, so that this always comes out even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from areal_rloo.engines.embedded.parameters import Architecture

SPARE_SHARE = 1 / 16  # of the memory stays free when a request starts beside others, so that they can grow a while
_SMALLEST_CAPACITY = 128  # tokens, at least; smaller ones would be more blocks, and each block is three calls a layer


class RowKind(IntEnum):
    """What a row is for. The first two are decoded, each with its own weights."""

    RUNNING = 0
    PINNED = 1
    PREFILLED = 2  # the prompt is under computation
    KEPT = 3  # what a finished request left, for those that begin alike


@dataclass(slots=True, eq=False)
class CacheRow:
    """A place in the arena, and what is known of its content.

    Attributes:
        capacity: tokens it can hold.
        start: where it begins in the arena, in tokens.
        kind: of the block it lies in.
        slot: of the request it belongs to, in its batch; -1 for none.
        tokens: int32, the tokens whose keys and values it is known to hold from its beginning; for other requests.
        policy_version: of the weights that made all of `tokens`.
        keys: hashes under which its tokens are found.
    """

    capacity: int
    start: int
    kind: RowKind
    slot: int = -1
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    policy_version: int = -1
    keys: list[int] = field(default_factory=list)


def tokens_for(
    num_slots: int, context_tokens: int, architecture: Architecture, *, device: torch.device, dtype: torch.dtype
) -> int:
    """Room for a whole context of every slot, as far as half of the memory that is free now goes; for one at least.

    And for a quarter more rows, kept ones: when all slots start anew at once, their prompts would be gone otherwise.
    """
    a = architecture
    capacities = _capacities(context_tokens)
    largest = capacities[-1]
    num_rows = num_slots + 1 + num_slots // 4
    all_slots = math.ceil(num_rows * largest / (1 - SPARE_SHARE)) + capacities[0]  # the cache cuts what is not one
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    token_bytes = (2 * a.num_layers * a.head_dim + 1) * a.num_kv_heads * dtype.itemsize
    return max(largest, min(all_slots, free_bytes // 2 // token_bytes))


def _capacities(context_tokens: int) -> list[int]:
    """A context halved a few times, ascending."""
    num_halvings = max(0, (context_tokens // _SMALLEST_CAPACITY).bit_length() - 1)
    smallest = -(-context_tokens // 2**num_halvings)
    return [smallest * 2**halving for halving in range(num_halvings + 1)]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one kind and capacity: they lie one behind the other."""

    start: int
    capacity: int
    rows: list[CacheRow]


class Cache:
    """Keys and values of every row.

    Attributes:
        tensor: [num_layers, 2 * num_tokens * num_kv_heads, head_dim]: keys of the whole arena, then values. Of a row
            each head's vectors stand together: [num_kv_heads, capacity, head_dim].
        mask: [num_tokens * num_kv_heads]: 0 where a vector has been written, -inf elsewhere; added to scores.
        capacities: that rows may have, ascending.
        num_moves: how often rows came, went or changed places; where they lie is known until it changes.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        num_tokens: int,
        context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        a = architecture
        self.capacities = _capacities(context_tokens)
        smallest = self.capacities[0]
        self.num_tokens: int = max(num_tokens // smallest * smallest, self.capacities[-1])
        self.num_kv_heads, self.head_dim = a.num_kv_heads, a.head_dim
        self.num_vectors = self.num_tokens * a.num_kv_heads
        self.tensor = torch.zeros(a.num_layers, 2 * self.num_vectors, a.head_dim, device=device, dtype=dtype)
        self.mask = torch.full((self.num_vectors,), -torch.inf, device=device, dtype=dtype)
        self._halves = self.tensor.unflatten(1, (2, self.num_vectors))
        self._blocks: list[list[CacheRow]] = [[] for _ in range(len(RowKind) * len(self.capacities))]
        self._sizes: list[int] = [capacity for capacity in reversed(self.capacities) for _ in RowKind]
        self.used_tokens = 0
        self.num_moves = 0

    @property
    def free_tokens(self) -> int:
        return self.num_tokens - self.used_tokens

    def capacity_for(self, num_tokens: int) -> int:
        """The smallest that holds as many."""
        return next(capacity for capacity in self.capacities if capacity >= num_tokens)

    def blocks(self, kind: RowKind) -> list[Block]:
        """Where the rows of a kind lie; the batch's order of rows is theirs."""
        places = range(kind, len(self._blocks), len(RowKind))
        return [Block(self._blocks[i][0].start, self._sizes[i], self._blocks[i]) for i in places if self._blocks[i]]

    def add(self, capacity: int, kind: RowKind) -> CacheRow:
        """An empty row; `free_tokens` must hold it."""
        row = CacheRow(capacity, 0, kind)
        self._insert(row)
        self.mark_written(row, 0)
        return row

    def remove(self, row: CacheRow) -> None:
        """Give its place back."""
        self.num_moves += 1
        place = self._place(row.capacity, row.kind)
        rows = self._blocks[place]
        last = rows.pop()
        if last is not row:
            self._copy(last.start, row.start, row.capacity)
            rows[rows.index(row)] = last
            last.start = row.start
        self.used_tokens -= row.capacity
        self._close_gap(place + 1, row.capacity)

    def turn_into(self, row: CacheRow, kind: RowKind) -> None:
        """Change what a row is for: it changes places with the row at its block's border, and the border moves."""
        self.num_moves += 1
        while row.kind != kind:
            forward = row.kind < kind
            place = self._place(row.capacity, row.kind)
            rows = self._blocks[place]
            self._exchange(rows, rows.index(row), len(rows) - 1 if forward else 0)
            if forward:
                self._blocks[place + 1].insert(0, rows.pop())
            else:
                self._blocks[place - 1].append(rows.pop(0))
            row.kind = RowKind(row.kind + (1 if forward else -1))

    def resize(self, row: CacheRow, capacity: int, num_written: int) -> None:
        """Give a row another capacity, its first tokens kept; `free_tokens` must hold what it grows by."""
        kept = self.vectors(row, num_written).clone()
        self.remove(row)
        row.capacity = capacity
        self._insert(row)
        self.vectors(row, num_written).copy_(kept)
        self.mark_written(row, num_written)

    def copy_beginning(self, source: CacheRow, row: CacheRow, num_tokens: int) -> None:
        """Let a row hold the first tokens that another does."""
        self.vectors(row, num_tokens).copy_(self.vectors(source, num_tokens))
        self.mark_written(row, num_tokens)

    def mark_written(self, row: CacheRow, num_tokens: int) -> None:
        """Only the first tokens of a row are attended to."""
        mask = self._slab(self.mask, row.start, row.capacity).view(self.num_kv_heads, row.capacity)
        mask[:, :num_tokens] = 0
        mask[:, num_tokens:] = -torch.inf

    def read(self, block: Block, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of a block: twice [num_layers, num_rows * num_kv_heads, longest, head_dim]; its mask."""
        num_heads = len(block.rows) * self.num_kv_heads
        size = len(block.rows) * block.capacity
        vectors: Tensor = self._halves.narrow(2, block.start * self.num_kv_heads, size * self.num_kv_heads)
        keys, values = vectors.unflatten(2, (num_heads, block.capacity))[:, :, :, :longest].unbind(1)
        mask = self._slab(self.mask, block.start, size).view(num_heads, 1, block.capacity)[:, :, :longest]
        return keys, values, mask

    def vectors(self, row: CacheRow, num_tokens: int) -> Tensor:
        """Keys and values of a row's first tokens: [num_layers, 2, num_kv_heads, num_tokens, head_dim]."""
        slab: Tensor = self._halves.narrow(2, row.start * self.num_kv_heads, row.capacity * self.num_kv_heads)
        by_head: Tensor = slab.unflatten(2, (self.num_kv_heads, row.capacity))
        return by_head[:, :, :, :num_tokens]

    def places(self, starts: Tensor, capacities: Tensor, positions: Tensor) -> Tensor:
        """Where the keys and values of tokens lie in a layer: [num_tokens, 2 * num_kv_heads] int64, keys first.

        Args:
            starts, capacities: [num_tokens] int64, of the rows the tokens are in.
            positions: [num_tokens] int64, within these.
        """
        head = torch.arange(self.num_kv_heads, device=positions.device)
        keys = (starts * self.num_kv_heads + positions)[:, None] + capacities[:, None] * head
        return torch.cat([keys, keys + self.num_vectors], dim=1)

    def _place(self, capacity: int, kind: RowKind) -> int:
        return (len(self.capacities) - 1 - self.capacities.index(capacity)) * len(RowKind) + kind

    def _insert(self, row: CacheRow) -> None:
        assert row.capacity <= self.free_tokens, f"{row.capacity} tokens do not fit in {self.free_tokens}"
        self.num_moves += 1
        place = self._place(row.capacity, row.kind)
        row.start = sum(len(rows) * size for rows, size in zip(self._blocks[: place + 1], self._sizes, strict=False))
        self._open_gap(place + 1, row.capacity)
        self._blocks[place].append(row)
        self.used_tokens += row.capacity

    def _slab(self, of_vectors: Tensor, start: int, num_tokens: int) -> Tensor:
        return of_vectors.narrow(-1, start * self.num_kv_heads, num_tokens * self.num_kv_heads)

    def _open_gap(self, place: int, size: int) -> None:
        for index in range(len(self._blocks) - 1, place - 1, -1):
            rows = self._blocks[index]
            if not rows:
                continue
            num = min(len(rows), size // self._sizes[index])
            distance = size if num == len(rows) else len(rows) * self._sizes[index]
            self._move(rows[:num], distance)
            self._blocks[index] = rows[num:] + rows[:num]

    def _close_gap(self, place: int, size: int) -> None:
        for index in range(place, len(self._blocks)):
            rows = self._blocks[index]
            if not rows:
                continue
            num = min(len(rows), size // self._sizes[index])
            distance = size if num == len(rows) else len(rows) * self._sizes[index]
            self._move(rows[len(rows) - num :], -distance)
            self._blocks[index] = rows[len(rows) - num :] + rows[: len(rows) - num]

    def _move(self, rows: list[CacheRow], distance: int) -> None:
        start, size = rows[0].start, len(rows) * rows[0].capacity
        self._copy(start, start + distance, size)
        for row in rows:
            row.start += distance

    def _exchange(self, rows: list[CacheRow], index: int, other: int) -> None:
        if index == other:
            return
        one, two = rows[index], rows[other]
        for tensor in (self._halves.transpose(2, 3), self.mask):
            first, second = (self._slab(tensor, row.start, row.capacity) for row in (one, two))
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        one.start, two.start = two.start, one.start
        rows[index], rows[other] = two, one

    def _copy(self, source: int, to: int, num_tokens: int) -> None:
        for tensor in (self._halves.transpose(2, 3), self.mask):
            self._slab(tensor, to, num_tokens).copy_(self._slab(tensor, source, num_tokens))
