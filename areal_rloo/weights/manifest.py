"""What a version of the weights is: a manifest (names, shapes, dtypes, places) and flat buckets of bytes.

A transport moves whole buckets, never single tensors. A notice tells a worker which version is on offer and how to take
it; it travels as opaque bytes in a WeightsNotice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: of a bucket's length
_CHECKSUM_ROW = 4096  # words under one weight
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor and its place: a bucket and an offset in it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket_index: int
    offset_bytes: int
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """Every tensor of a model, and the size of each bucket in bytes, a multiple of 64.

    A bucket's tensors have one dtype and stand one behind the other without a gap, which is also what SGLang calls a
    flattened bucket.
    """

    tensors: tuple[TensorSpec, ...]
    bucket_num_bytes: tuple[int, ...]

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_num_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_num_bytes)

    @property
    def filled_bytes(self) -> list[int]:
        """Of each bucket, without what pads it."""
        filled = [0] * self.num_buckets
        for spec in self.tensors:
            filled[spec.bucket_index] += spec.num_bytes
        return filled


class SharedMemoryOffer(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Map this file: it holds all buckets, one behind the other."""

    path: str


class CollectiveOffer(msgspec.Struct, frozen=True, tag="collective"):
    """Join this process group and receive what each bucket is filled with from rank 0."""

    host: str
    port: int
    name: str  # of the group; another one at every epoch
    ranks: dict[str, int]  # worker_id to the first of its ranks; the sender is 0
    world_size: int
    backend: str
    timeout_s: float


class Notice(msgspec.Struct, frozen=True):
    """A version on offer."""

    policy_version: int
    manifest: Manifest
    checksum: int
    offer: SharedMemoryOffer | CollectiveOffer


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


def encode_notice(notice: Notice) -> bytes:
    return _encoder.encode(notice)


def decode_notice(body: bytes) -> Notice:
    """Raises msgspec.DecodeError for bytes that are not a notice."""
    return _decoder.decode(body)


def build_manifest(
    named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, dtype: torch.dtype | None = None
) -> Manifest:
    """Lay tensors into buckets of one dtype and at most `bucket_bytes`, in order; a larger tensor gets one of its own.

    Args:
        named_tensors: names and tensors; only shapes and dtypes are read.
        bucket_bytes: soft size of a bucket.
        dtype: floating-point tensors travel in it; None keeps each one's own.
    """
    names = {value: key for key, value in _DTYPES.items()}
    tensors: list[TensorSpec] = []
    sizes: list[int] = []
    for name, tensor in named_tensors:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * target.itemsize
        if not sizes or sizes[-1] + num_bytes > bucket_bytes or names[target] != tensors[-1].dtype:
            sizes.append(0)
        tensors.append(TensorSpec(name, tuple(tensor.shape), names[target], len(sizes) - 1, sizes[-1], num_bytes))
        sizes[-1] += num_bytes
    return Manifest(tuple(tensors), tuple(max(_ALIGNMENT, _aligned(size)) for size in sizes))


def views(manifest: Manifest, buckets: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that look into the buckets ([num_bytes] uint8 each); nothing is copied."""
    for spec in manifest.tensors:
        raw = buckets[spec.bucket_index][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        yield spec.name, raw.view(_DTYPES[spec.dtype]).view(spec.shape)


def by_bucket(manifest: Manifest) -> list[list[TensorSpec]]:
    """The tensors of each bucket, in order."""
    buckets: list[list[TensorSpec]] = [[] for _ in range(manifest.num_buckets)]
    for spec in manifest.tensors:
        buckets[spec.bucket_index].append(spec)
    return buckets


def gather(manifest: Manifest, named_tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[Tensor]) -> None:
    """Copy a model's tensors into the buckets, casting to the manifest's dtypes."""
    for (name, place), (given, tensor) in zip(views(manifest, buckets), named_tensors, strict=True):
        assert name == given, f"the model gives {given} where the manifest has {name}"
        place.copy_(tensor, non_blocking=True)


def checksum(buckets: Sequence[Tensor]) -> int:
    """A 64-bit sum that tells torn or mixed buffers apart, at the speed of memory and on any device.

    Every 64-bit word is added with a weight that depends on its bucket and its row, all modulo 2**64. Weights are odd,
    so that no single bit can change without changing the sum. Buckets are a whole number of words long.
    """
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        words = bucket.view(torch.int64)
        whole = len(words) // _CHECKSUM_ROW
        sums = words[: whole * _CHECKSUM_ROW].view(whole, _CHECKSUM_ROW).sum(1)
        weights = torch.arange(whole, dtype=torch.int64, device=bucket.device) * 2 + 1
        rest = words[whole * _CHECKSUM_ROW :].sum() * (2 * whole + 1)
        total += int((sums * weights).sum() + rest) * (2 * number + 1)
    return total % 2**64


def empty_buckets(manifest: Manifest, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
    """Fresh buckets in one storage. What pads them is 0 everywhere, and never sent."""
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    return list(flat.split(list(manifest.bucket_num_bytes)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
