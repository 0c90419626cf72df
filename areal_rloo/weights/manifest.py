"""A version of the weights: a manifest (names, shapes, dtypes, places) and flat buckets of bytes.

A transport moves whole buckets, never single tensors. A notice tells a worker which version is on offer and how to
receive the buckets; on the wire a notice is opaque bytes in a WeightsNotice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
import torch
from torch import Tensor

from areal_rloo.models.device import finish_stream
from areal_rloo.models.fingerprint import Sample

_ALIGNMENT = 64  # bytes; bucket lengths are multiples
_CHECKSUM_ROW = 4096  # words with a common factor
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)
}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and a place: a bucket and an offset."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket_index: int
    offset_bytes: int
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """Every tensor of a version, and the size of each bucket in bytes, a multiple of 64.

    The tensors of a bucket share a dtype and are contiguous; SGLang calls this a flattened bucket.
    """

    tensors: tuple[TensorSpec, ...]
    bucket_num_bytes: tuple[int, ...]
    base: str = ""  # of adapters alone: the digest of their model (`models/stored.py`)

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_num_bytes)

    @property
    def filled_bytes(self) -> list[int]:
        """Bytes of each bucket without the padding."""
        return [sum(spec.num_bytes for spec in bucket) for bucket in by_bucket(self)]


class SharedMemoryOffer(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Map this file: it holds all buckets, contiguous."""

    path: str


class CollectiveOffer(msgspec.Struct, frozen=True, tag="collective"):
    """Join this process group and receive the filled part of each bucket from rank 0."""

    host: str
    port: int
    name: str  # of the group; every group has another
    ranks: dict[str, int]  # worker_id to the first of the worker's ranks; the sender is 0
    world_size: int
    backend: str
    timeout_s: float


class Notice(msgspec.Struct, frozen=True):
    """A version on offer.

    `samples` prove the version to a worker whose engine receives the buckets itself; each has another digest.
    """

    policy_version: int
    manifest: Manifest
    checksum: int
    offer: SharedMemoryOffer | CollectiveOffer
    samples: tuple[Sample, ...] = ()


def build_manifest(
    named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, dtype: torch.dtype | None = None
) -> Manifest:
    """Lay tensors into buckets of about `bucket_bytes`, in order; only shapes and dtypes are read.

    Every bucket has a single dtype, and a large tensor a separate bucket. Floating-point tensors are cast to `dtype`,
    or keep their dtypes if None.
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
    return Manifest(tuple(tensors), tuple(max(1, math.ceil(size / _ALIGNMENT)) * _ALIGNMENT for size in sizes))


def views(manifest: Manifest, buckets: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield names, and tensors that are views of the buckets ([num_bytes] uint8 each)."""
    for spec in manifest.tensors:
        raw = buckets[spec.bucket_index][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        yield spec.name, raw.view(_DTYPES[spec.dtype]).view(spec.shape)


def by_bucket(manifest: Manifest) -> list[list[TensorSpec]]:
    """List the tensors of each bucket, in order."""
    return [list(specs) for _, specs in groupby(manifest.tensors, key=lambda spec: spec.bucket_index)]


def gather(manifest: Manifest, named_tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[Tensor]) -> None:
    """Copy a model's tensors into the buckets, casting to the manifest's dtypes; return when the copies are done."""
    devices = set()
    for (name, place), (given, tensor) in zip(views(manifest, buckets), named_tensors, strict=True):
        assert name == given, f"the model gives {given} where the manifest has {name}"
        place.copy_(tensor, non_blocking=True)
        devices.add(tensor.device)
    finish_copies(devices)


def finish_copies(devices: Iterable[torch.device]) -> None:
    """Wait for the copies from these devices. CUDA may return from a copy into CPU memory before the end of the copy,
    whether the memory is pinned or not."""
    for device in devices:
        finish_stream(device)


def checksum(buckets: Sequence[Tensor]) -> int:
    """Compute a 64-bit sum that detects torn or mixed buffers, at memory bandwidth and on any device.

    Every 64-bit word is multiplied by a factor of the bucket and the row, and added modulo 2**64. Factors are odd, so
    a change of any single bit changes the sum. Buckets are a whole number of words long.
    """
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        words = bucket.view(torch.int64)
        whole = len(words) // _CHECKSUM_ROW
        sums = words[: whole * _CHECKSUM_ROW].view(whole, _CHECKSUM_ROW).sum(1)
        factors = torch.arange(whole, dtype=torch.int64, device=bucket.device) * 2 + 1
        rest = words[whole * _CHECKSUM_ROW :].sum() * (2 * whole + 1)
        total += int((sums * factors).sum() + rest) * (2 * number + 1)
    return total % 2**64


def empty_buckets(manifest: Manifest, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
    """Allocate buckets in a single storage. The padding is 0 and never sent."""
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    return list(flat.split(list(manifest.bucket_num_bytes)))
