"""The layout of a version: tensors do not overlap and round-trip, and mixed buffers change the checksum."""

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.weights.manifest import (
    Notice,
    SharedMemoryOffer,
    build_manifest,
    checksum,
    empty_buckets,
    gather,
    views,
)

CPU = torch.device("cpu")
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
shapes = st.lists(st.integers(0, 7), max_size=3)


@given(st.lists(st.tuples(shapes, dtypes), max_size=8), st.integers(1, 600))
def test_tensors_round_trip_through_contiguous_buckets(
    kinds: list[tuple[list[int], torch.dtype]], bucket_bytes: int
) -> None:
    tensors = [(str(i), torch.randint(0, 99, shape).to(dtype)) for i, (shape, dtype) in enumerate(kinds)]
    manifest = build_manifest(tensors, bucket_bytes=bucket_bytes)
    buckets = empty_buckets(manifest, CPU)
    gather(manifest, tensors, buckets)
    for (name, tensor), (given_name, view) in zip(tensors, views(manifest, buckets), strict=True):
        assert name == given_name
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
    ends: dict[int, int] = {}
    dtypes_of: dict[int, set[str]] = {}
    for spec in manifest.tensors:
        assert spec.offset_bytes == ends.get(spec.bucket_index, 0)
        ends[spec.bucket_index] = spec.offset_bytes + spec.num_bytes
        dtypes_of.setdefault(spec.bucket_index, set()).add(spec.dtype)
    assert manifest.filled_bytes == [ends[index] for index in range(len(manifest.bucket_num_bytes))]
    assert all(
        filled <= size and size % 64 == 0 and size > 0
        for filled, size in zip(manifest.filled_bytes, manifest.bucket_num_bytes, strict=True)
    )
    assert all(len(kinds) == 1 for kinds in dtypes_of.values())


def test_floats_are_cast_to_the_transfer_dtype_and_integers_are_not() -> None:
    tensors = [("a", torch.tensor([1.5])), ("b", torch.tensor([3]))]
    manifest = build_manifest(tensors, bucket_bytes=1024, dtype=torch.bfloat16)
    buckets = empty_buckets(manifest, CPU)
    gather(manifest, tensors, buckets)
    assert [view.dtype for _, view in views(manifest, buckets)] == [torch.bfloat16, torch.int64]


@given(st.integers(0, 2**13 - 1), st.integers(0, 63))
def test_one_flipped_bit_changes_the_checksum(word: int, bit: int) -> None:
    bucket = torch.arange(2**16, dtype=torch.int64).to(torch.uint8)
    before = checksum([bucket])
    bucket[8 * word + bit // 8] ^= 1 << (bit % 8)
    assert checksum([bucket]) != before


def test_mixed_or_exchanged_buckets_change_the_checksum() -> None:
    one, other = torch.ones(2**16, dtype=torch.uint8), torch.full((2**16,), 2, dtype=torch.uint8)
    torn = torch.cat([one[: 2**15], other[2**15 :]])
    assert len({checksum([one]), checksum([other]), checksum([torn])}) == 3
    assert checksum([one, other]) != checksum([other, one])


def test_a_notice_round_trips() -> None:
    manifest = build_manifest([("a", torch.zeros(3, 4))], bucket_bytes=64)
    notice = Notice(3, manifest, 2**62, SharedMemoryOffer("/dev/shm/x"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(notice), type=Notice) == notice
