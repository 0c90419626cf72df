"""From shards to the buckets of a broadcast: bucket by bucket, a message of each rank to rank 0; never a second model.

What is needed beside the buckets is one bucket's shards of two ranks, on rank 0: one that is copied into its place, and
one on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_rloo.learner.parallel.sharding import Sharding
from areal_rloo.weights.manifest import Manifest, TensorSpec, by_bucket, gather, views


@torch.no_grad()
def gather_weights(
    manifest: Manifest,
    named: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Tensor] | None,
    sharding: Sharding | None,
) -> None:
    """Fill the buckets with whole tensors. Every rank calls it; rank 0 alone has buckets.

    Args:
        manifest: of the whole tensors.
        named: names and tensors in the manifest's order; sharded ones along their first dimension.
        buckets: [num_bytes] uint8 each, on rank 0.
        sharding: None where nothing is sharded.
    """
    if sharding is None:
        assert buckets is not None, "the only rank has the buckets"
        gather(manifest, named, buckets)
    elif sharding.in_first_copy:
        _gather_shards(manifest, named, buckets, sharding)
    if buckets is not None and buckets[0].is_pinned():
        torch.cuda.current_stream().synchronize()  # copies into pinned memory are under way


def _gather_shards(
    manifest: Manifest, named: Iterable[tuple[str, Tensor]], buckets: Sequence[Tensor] | None, sharding: Sharding
) -> None:
    places = None if buckets is None else dict(views(manifest, buckets))
    tensors = iter(named)
    for specs in by_bucket(manifest):
        shards = []
        for spec in specs:
            name, tensor = next(tensors)
            assert name == spec.name, f"the policy gives {name} where the manifest has {spec.name}"
            assert isinstance(tensor, DTensor), f"{name} is not sharded"
            shards.append(tensor.to_local())
        _gather_bucket(specs, shards, places, sharding)  # a call of its own: what it took is free before the next


def _gather_bucket(
    specs: Sequence[TensorSpec], shards: Sequence[Tensor], places: Mapping[str, Tensor] | None, sharding: Sharding
) -> None:
    """Not by `dist.gather`, for which Gloo takes a second copy of everything it receives."""
    group = sharding.shards
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [[_rows(spec, of_rank, num) * _row_size(spec) for spec in specs] for of_rank in range(num)]
    if rank != 0:
        flat = _flat(specs, sizes[rank], sharding)
        _copy(shards, flat.split(sizes[rank]))
        if len(flat):
            dist.send(flat, group=group, group_dst=0)
        return
    assert places is not None, "rank 0 has the buckets"
    of_tensors = (
        places[spec.name].view(-1).split(of_ranks)
        for spec, of_ranks in zip(specs, map(list, zip(*sizes, strict=True)), strict=True)
    )
    own, *others = zip(*of_tensors, strict=True)
    coming = _begun(1, sizes, specs, sharding)
    _copy(shards, own)
    for of_rank, theirs in enumerate(others, start=1):
        received, work = coming
        coming = _begun(of_rank + 1, sizes, specs, sharding)
        if work is not None:
            work.wait()
        _copy(received.split(sizes[of_rank]), theirs)


def _begun(
    rank: int, sizes: Sequence[Sequence[int]], specs: Sequence[TensorSpec], sharding: Sharding
) -> tuple[Tensor, dist.Work | None]:
    """What a rank sends, on its way here; nothing of one that has no rows, or that is not there."""
    received = _flat(specs, sizes[rank] if rank < len(sizes) else (), sharding)
    work = dist.irecv(received, group=sharding.shards, group_src=rank) if len(received) else None
    return received, work


def _flat(specs: Sequence[TensorSpec], sizes: Sequence[int], sharding: Sharding) -> Tensor:
    return torch.empty(sum(sizes), dtype=getattr(torch, specs[0].dtype), device=sharding.mesh.device_type)


def _copy(parts: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for part, place in zip(parts, places, strict=True):
        place.copy_(part.flatten(), non_blocking=True)


def _rows(spec: TensorSpec, rank: int, num_ranks: int) -> int:
    """Rows of a rank's shard, as torch.chunk cuts them."""
    size = -(-spec.shape[0] // num_ranks)
    return max(0, min(size, spec.shape[0] - rank * size))


def _row_size(spec: TensorSpec) -> int:
    size = 1
    for extent in spec.shape[1:]:
        size *= extent
    return size
