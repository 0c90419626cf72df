"""Compare the cache's arena with rows that each have a separate tensor."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_rloo.engines.embedded.cache import Cache, CacheRow, RowKind
from areal_rloo.engines.embedded.parameters import load_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def make_cache(tiny_folders: dict[str, Path]):  # type: ignore[no-untyped-def]
    parameters, _ = load_checkpoint(tiny_folders["qwen2"], context_tokens=8, device=CPU, dtype=torch.float32)

    def make(*, num_tokens: int, context_tokens: int) -> Cache:
        return Cache(
            parameters.architecture,
            num_tokens=num_tokens,
            context_tokens=context_tokens,
            device=CPU,
            dtype=torch.float32,
        )

    return make


def _fill(cache: Cache, row: CacheRow, num_tokens: int, value: int) -> torch.Tensor:
    """Write numbers unique to this row; return them."""
    cache.mark_written(row, num_tokens)
    place = cache.vectors(row, num_tokens)
    place.copy_(value * 1000 + torch.arange(place.numel(), dtype=torch.float32).view_as(place) % 997)
    return place.clone()


def _attended(cache: Cache, row: CacheRow) -> list[int]:
    """Return the number of visible tokens of each head; check that these are the first tokens."""
    begin, end = row.start * cache.num_kv_heads, (row.start + row.capacity) * cache.num_kv_heads
    seen = cache.mask[begin:end].view(cache.num_kv_heads, row.capacity) == 0
    num: list[int] = seen.sum(1).tolist()
    assert torch.equal(seen, torch.arange(row.capacity) < seen.sum(1, keepdim=True))
    return num


def _assert_dense(cache: Cache) -> None:
    """Check that rows lie without gaps, largest first."""
    rows = sorted((row for kind in RowKind for block in cache.blocks(kind) for row in block), key=lambda r: r.start)
    end = 0
    for row in rows:
        assert row.start == end
        end += row.capacity
    assert end == cache.used_tokens
    assert [row.capacity for row in rows] == sorted((row.capacity for row in rows), reverse=True)
    for kind in RowKind:
        for block in cache.blocks(kind):
            assert [row.start for row in block] == [block[0].start + i * block[0].capacity for i in range(len(block))]
            assert {row.kind for row in block} == {kind}


@settings(max_examples=60)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000), st.integers(0, 3)), max_size=60))
def test_no_change_of_the_arena_loses_the_content_of_a_row(make_cache, moves) -> None:  # type: ignore[no-untyped-def]
    cache = make_cache(num_tokens=3000, context_tokens=1030)
    contents: dict[CacheRow, torch.Tensor] = {}
    for number, (move, choice, kind) in enumerate(moves):
        rows = list(contents)
        if move == 0 or not rows:
            capacity = cache.capacities[choice % len(cache.capacities)]
            if capacity <= cache.free_tokens:
                row = cache.add(capacity, RowKind(kind))
                contents[row] = _fill(cache, row, choice % (capacity + 1), number)
        elif move == 1:
            row = rows[choice % len(rows)]
            cache.remove(row)
            del contents[row]
        elif move == 2:
            cache.turn_into(rows[choice % len(rows)], RowKind(kind))
        else:
            row = rows[choice % len(rows)]
            num_written = contents[row].shape[3]
            fitting = [c for c in cache.capacities if num_written <= c <= row.capacity + cache.free_tokens]
            cache.resize(row, fitting[choice % len(fitting)], num_written)
        _assert_dense(cache)
        for row, written in contents.items():
            torch.testing.assert_close(cache.vectors(row, written.shape[3]), written, rtol=0, atol=0)
            assert _attended(cache, row) == [written.shape[3]] * cache.num_kv_heads


def test_a_block_is_read_in_place_and_masks_unwritten_vectors(make_cache) -> None:  # type: ignore[no-untyped-def]
    cache = make_cache(num_tokens=1024, context_tokens=512)
    cache.add(512, RowKind.KEPT)
    rows = [cache.add(128, RowKind.RUNNING) for _ in range(3)]
    written = [_fill(cache, row, num, num) for row, num in zip(rows, (5, 9, 3), strict=True)]
    (block,) = cache.blocks(RowKind.RUNNING)
    keys, values, mask = cache.read(block, 9)
    assert keys.untyped_storage().data_ptr() == cache.tensor.untyped_storage().data_ptr()
    for index, row in enumerate(written):
        heads = slice(index * cache.num_kv_heads, (index + 1) * cache.num_kv_heads)
        num = row.shape[3]
        torch.testing.assert_close(keys[:, heads, :num], row[:, 0], rtol=0, atol=0)
        torch.testing.assert_close(values[:, heads, :num], row[:, 1], rtol=0, atol=0)
        assert (mask[heads, 0] == 0).sum(1).tolist() == [num] * cache.num_kv_heads


def test_capacities_double_up_to_a_whole_context(make_cache) -> None:  # type: ignore[no-untyped-def]
    for context_tokens in (1, 127, 128, 200, 256, 640, 1000, 4097):
        capacities = make_cache(num_tokens=0, context_tokens=context_tokens).capacities
        assert all(larger == 2 * smaller for smaller, larger in itertools.pairwise(capacities))
        assert context_tokens <= capacities[-1] < context_tokens + len(capacities) * 128
        assert len(capacities) == 1 or 128 <= capacities[0] <= 256
