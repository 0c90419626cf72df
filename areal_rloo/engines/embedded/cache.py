"""Store the keys and values of all rows in a single arena, and find rows that begin with the same tokens.

Memory limits tokens, not rows. A row has a capacity: the longest context, halved a few times. A full row is copied to
the next capacity. Rows lie without gaps, largest capacities first, and within a capacity by kind:

    [640 running][640 pinned][640 prefilled][640 kept][320 running][320 pinned] ... [160 prefilled][160 kept] free

The rows of the same kind and capacity form a block. A batched matrix product reads a block in place, up to the longest
row. To open or close a gap, each later block moves as many rows as fit the gap from one end of the block to the other.
Every capacity divides the larger capacities, so the moved rows always fill the gap exactly.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_rloo.engines.embedded.families import Architecture
from areal_rloo.models.device import memory_of

SPARE_SHARE = 1 / 16  # of the memory stays free when a request starts, for the others to grow
_HASHED_TOKENS = 16
_SMALLEST_CAPACITY = 128  # tokens, at least: smaller capacities mean more blocks, and a block costs 3 calls a layer


class RowKind(IntEnum):
    """The use of a row. Running and pinned rows are decoded, each kind under other weights."""

    RUNNING = 0
    PINNED = 1
    PREFILLED = 2  # the prompt is being computed
    KEPT = 3  # left by a finished request, for requests that start with the same tokens


@dataclass(slots=True, eq=False)
class CacheRow:
    """A place in the arena, and the content for reuse by other requests."""

    capacity: int  # in tokens
    start: int  # offset in the arena, in tokens
    kind: RowKind
    slot: int = -1  # of the row's request in its batch; -1 while the request is not decoded
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # reusable first tokens
    policy_version: int = -1  # of the weights that computed all of `tokens`
    keys: list[int] = field(default_factory=list)  # hashes of beginnings of `tokens`


def tokens_for(
    num_slots: int, context_tokens: int, architecture: Architecture, *, device: torch.device, dtype: torch.dtype
) -> int:
    """Return the default size of the cache: a whole context for every slot, but at most half of the free memory.

    The cache holds at least one context. A quarter more rows are kept rows: without these, no prompt would stay cached
    when all slots start new requests at once.
    """
    a = architecture
    capacities = _capacities(context_tokens)
    largest = capacities[-1]
    num_rows = num_slots + 1 + num_slots // 4
    # The cache rounds down to a multiple of the smallest capacity.
    all_slots = math.ceil(num_rows * largest / (1 - SPARE_SHARE)) + capacities[0]
    token_bytes = (2 * a.num_layers * a.head_dim + 1) * a.num_kv_heads * dtype.itemsize
    return max(largest, min(all_slots, memory_of(device).free_bytes // 2 // token_bytes))


def _capacities(context_tokens: int) -> list[int]:
    """Return the context halved a few times, ascending."""
    num_halvings = max(0, (context_tokens // _SMALLEST_CAPACITY).bit_length() - 1)
    smallest = -(-context_tokens // 2**num_halvings)
    return [smallest * 2**halving for halving in range(num_halvings + 1)]


Block = list[CacheRow]
"""Adjacent rows of the same kind and capacity; at least one."""


class Cache:
    """Keys and values of every row.

    `tensor` is [num_layers, 2 * num_tokens * num_kv_heads, head_dim]: the keys of the whole arena, then the values. The
    vectors of a row are ordered by head: [num_kv_heads, capacity, head_dim]. `mask` is [num_tokens * num_kv_heads]: 0
    for a written vector, -inf elsewhere; added to attention scores.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        num_tokens: int,
        context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        has_memory: bool = True,
    ) -> None:
        """`has_memory`: False to allocate the memory later (`allocate`)."""
        a = architecture
        self.capacities = _capacities(context_tokens)  # of rows
        smallest = self.capacities[0]
        self.num_tokens: int = max(num_tokens // smallest * smallest, self.capacities[-1])
        self.num_kv_heads, self.head_dim = a.num_kv_heads, a.head_dim
        self.num_vectors = self.num_tokens * a.num_kv_heads
        self._num_layers, self._device, self._dtype = a.num_layers, device, dtype
        if has_memory:
            self.allocate()
        self._sizes = [capacity for capacity in reversed(self.capacities) for _ in RowKind]
        self._blocks: list[Block] = [[] for _ in self._sizes]
        self.used_tokens = 0
        self.num_moves = 0  # added, removed and moved rows; while the number is unchanged, so are the rows' positions

    @property
    def free_tokens(self) -> int:
        return self.num_tokens - self.used_tokens

    def allocate(self) -> None:
        """Take the memory of the whole arena."""
        shape = (self._num_layers, 2 * self.num_vectors, self.head_dim)
        self.tensor = torch.zeros(shape, device=self._device, dtype=self._dtype)
        self.mask = torch.full((self.num_vectors,), -torch.inf, device=self._device, dtype=self._dtype)
        self._halves = self.tensor.unflatten(1, (2, self.num_vectors))

    def release(self) -> None:
        """Forget all rows and give the memory back; no row can be added until `allocate`."""
        self._blocks = [[] for _ in self._sizes]
        self.used_tokens = 0
        self.num_moves += 1
        del self.tensor, self.mask, self._halves
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def capacity_for(self, num_tokens: int) -> int:
        return next(capacity for capacity in self.capacities if capacity >= num_tokens)

    def blocks(self, kind: RowKind) -> list[Block]:
        """Return the blocks of a kind; a batch has its rows in this order."""
        return [block for block in self._blocks[kind :: len(RowKind)] if block]

    def add(self, capacity: int, kind: RowKind) -> CacheRow:
        """Add an empty row, which must fit in `free_tokens`."""
        row = CacheRow(capacity, 0, kind)
        self._insert(row)
        self.mark_written(row, 0)
        return row

    def remove(self, row: CacheRow) -> None:
        self.num_moves += 1
        place = self._place(row.capacity, row.kind)
        rows = self._blocks[place]
        last = rows.pop()
        if last is not row:
            self._copy(last.start, row.start, row.capacity)
            rows[rows.index(row)] = last
            last.start = row.start
        self.used_tokens -= row.capacity
        self._shift(place + 1, row.capacity, -1)

    def turn_into(self, row: CacheRow, kind: RowKind) -> None:
        """Change the kind of a row: exchange the row with the row at the block's border, then move the border."""
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
        """Change the capacity of a row and keep the first tokens; the growth must fit in `free_tokens`."""
        kept = self.vectors(row, num_written).clone()
        self.remove(row)
        row.capacity = capacity
        self._insert(row)
        self.vectors(row, num_written).copy_(kept)
        self.mark_written(row, num_written)

    def copy_beginning(self, source: CacheRow, row: CacheRow, num_tokens: int) -> None:
        """Copy the first tokens of a row to another row."""
        self.vectors(row, num_tokens).copy_(self.vectors(source, num_tokens))
        self.mark_written(row, num_tokens)

    def mark_written(self, row: CacheRow, num_tokens: int) -> None:
        """Let attention see only the first tokens of a row."""
        mask = self._slab(self.mask, row.start, row.capacity).view(self.num_kv_heads, row.capacity)
        mask[:, :num_tokens] = 0
        mask[:, num_tokens:] = -torch.inf

    def read(self, block: Block, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values, each [num_layers, num_rows * num_kv_heads, longest, head_dim], and the mask."""
        start, capacity = block[0].start, block[0].capacity
        num_heads, size = len(block) * self.num_kv_heads, len(block) * capacity
        vectors: Tensor = self._halves.narrow(2, start * self.num_kv_heads, size * self.num_kv_heads)
        keys, values = vectors.unflatten(2, (num_heads, capacity))[:, :, :, :longest].unbind(1)
        mask = self._slab(self.mask, start, size).view(num_heads, 1, capacity)[:, :, :longest]
        return keys, values, mask

    def halves(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and all values of a layer, each [num_vectors, head_dim]."""
        keys, values = self._halves[layer].unbind()
        return keys, values

    def vectors(self, row: CacheRow, num_tokens: int) -> Tensor:
        """Return keys and values of the first tokens: [num_layers, 2, num_kv_heads, num_tokens, head_dim]."""
        slab: Tensor = self._halves.narrow(2, row.start * self.num_kv_heads, row.capacity * self.num_kv_heads)
        by_head: Tensor = slab.unflatten(2, (self.num_kv_heads, row.capacity))
        return by_head[:, :, :, :num_tokens]

    def places(self, starts: Tensor, capacities: Tensor, positions: Tensor) -> Tensor:
        """Return the indices of tokens' keys and values in a layer: [num_tokens, 2 * num_kv_heads] int64, keys first.

        `starts` and `capacities` are those of each token's row, `positions` count within the row: [num_tokens] int64.
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
        self._shift(place + 1, row.capacity, 1)
        self._blocks[place].append(row)
        self.used_tokens += row.capacity

    def _slab(self, of_vectors: Tensor, start: int, num_tokens: int) -> Tensor:
        return of_vectors.narrow(-1, start * self.num_kv_heads, num_tokens * self.num_kv_heads)

    def _shift(self, place: int, size: int, direction: Literal[1, -1]) -> None:
        """Open (1) or close (-1) a gap before the block at `place`: rows of each later block move from end to end."""
        for index in range(place, len(self._blocks))[::-direction]:
            rows, capacity = self._blocks[index], self._sizes[index]
            num = min(len(rows), size // capacity)
            distance = direction * (size if num == len(rows) else len(rows) * capacity)
            border = num if direction == 1 else len(rows) - num
            moved = rows[:border] if direction == 1 else rows[border:]
            if moved:
                self._copy(moved[0].start, moved[0].start + distance, num * capacity)
            for row in moved:
                row.start += distance
            self._blocks[index] = rows[border:] + rows[:border]

    def _exchange(self, rows: list[CacheRow], index: int, other: int) -> None:
        if index == other:
            return
        left, right = rows[index], rows[other]
        for tensor in (self._halves.transpose(2, 3), self.mask):
            first, second = (self._slab(tensor, row.start, row.capacity) for row in (left, right))
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        left.start, right.start = right.start, left.start
        rows[index], rows[other] = right, left

    def _copy(self, source: int, to: int, num_tokens: int) -> None:
        for tensor in (self._halves.transpose(2, 3), self.mask):
            self._slab(tensor, to, num_tokens).copy_(self._slab(tensor, source, num_tokens))


class Prefixes:
    """Finds rows by policy version and tokens.

    Rows of running requests offer their prompts, for the other samples of a group. Rows of finished requests offer all
    of their tokens, for the next turn of an episode. Rows are found by hashes of the first 16, 32, 48 ... tokens and of
    the whole prompt, then compared token by token. Rows of finished requests stay in `kept` until their memory is
    needed; the least recently used row is first, and is evicted first.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._rows: dict[int, CacheRow] = {}
        self.kept: OrderedDict[CacheRow, None] = OrderedDict()

    @property
    def kept_tokens(self) -> int:
        """Return the memory that `evict` can free, in tokens."""
        return sum(row.capacity for row in self.kept)

    def find(self, tokens: npt.NDArray[np.int32], policy_version: int) -> tuple[CacheRow | None, int]:
        """Return the row with the longest common beginning, and the number of common tokens."""
        for key in reversed(list(_keys(tokens.tolist(), policy_version))):
            row = self._rows.get(key)
            if row is not None and row.policy_version == policy_version:
                num = _num_equal(row.tokens, tokens)
                if num > 0:
                    return row, num
        return None, 0

    def offer(self, row: CacheRow, tokens: npt.NDArray[np.int32], policy_version: int) -> None:
        """Index a row by these tokens, all computed by this version. Earlier offers of the row stay valid."""
        row.tokens, row.policy_version = tokens, policy_version
        for key in _keys(tokens.tolist(), policy_version):
            self._rows[key] = row  # the latest row is likely to stay longest
            row.keys.append(key)

    def withdraw(self, row: CacheRow) -> None:
        """Let no request start from this row."""
        for key in row.keys:
            if self._rows.get(key) is row:
                del self._rows[key]
        row.keys = []
        row.policy_version = -1

    def used(self, row: CacheRow) -> None:
        if row in self.kept:
            self.kept.move_to_end(row)

    def take(self, row: CacheRow) -> None:
        """Hand a kept row to the caller alone."""
        del self.kept[row]
        self.withdraw(row)

    def evict(self) -> bool:
        """Free the memory of the least recently used kept row; return False if no row is kept."""
        if not self.kept:
            return False
        row, _ = self.kept.popitem(last=False)
        self.withdraw(row)
        self._cache.remove(row)
        return True

    def clear(self) -> None:
        """Forget all rows; the caller frees their memory."""
        self._rows.clear()
        self.kept.clear()

    def forget_other_versions(self, policy_versions: Sequence[int]) -> None:
        """Drop rows that other versions computed: the weights were swapped."""
        for row in [row for row in self._rows.values() if row.policy_version not in policy_versions]:
            self.withdraw(row)
        for row in [row for row in self.kept if row.policy_version not in policy_versions]:
            del self.kept[row]
            self._cache.remove(row)


def _keys(tokens: list[int], policy_version: int) -> Iterator[int]:
    """Yield hashes of longer and longer beginnings; each hash includes the hash before."""
    key = hash(policy_version)
    for end in range(_HASHED_TOKENS, len(tokens) + 1, _HASHED_TOKENS):
        key = hash((key, tuple(tokens[end - _HASHED_TOKENS : end])))
        yield key
    rest = len(tokens) % _HASHED_TOKENS
    if rest:
        yield hash((key, tuple(tokens[-rest:])))


def _num_equal(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    num = min(len(left), len(right))
    differ = left[:num] != right[:num]
    return int(differ.argmax()) if differ.any() else num
