"""From shards to the buckets of a broadcast: one collective a bucket, towards rank 0, and never a second model.

What is needed beside the buckets is one bucket's shards: this rank's own to send, and on rank 0 those of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        parts = _to_rank_0(specs, shards, sharding)
        if places is not None:
            for index, spec in enumerate(specs):
                rows = torch.cat([of_rank[index] for of_rank in parts])
                places[spec.name].copy_(rows.view(spec.shape), non_blocking=True)


def _to_rank_0(specs: Sequence[TensorSpec], shards: Sequence[Tensor], sharding: Sharding) -> list[list[Tensor]]:
    """By rank, the flat shards of a bucket's tensors; nothing on ranks other than 0."""
    group = sharding.shards
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [[_rows(spec, of_rank, num) * _row_size(spec) for spec in specs] for of_rank in range(num)]
    longest = max(map(sum, sizes))
    dtype = getattr(torch, specs[0].dtype)
    own = torch.zeros(longest, dtype=dtype, device=sharding.mesh.device_type)
    start = 0
    for shard in shards:
        own[start : start + shard.numel()].copy_(shard.flatten())
        start += shard.numel()
    everyone = [torch.empty_like(own) for _ in range(num)] if rank == 0 else None
    dist.gather(own, everyone, group=group, group_dst=0)
    return [list(flat[: sum(of_rank)].split(of_rank)) for flat, of_rank in zip(everyone or (), sizes, strict=False)]


def _rows(spec: TensorSpec, rank: int, num_ranks: int) -> int:
    """Rows of a rank's shard, as torch.chunk cuts them."""
    size = -(-spec.shape[0] // num_ranks)
    return max(0, min(size, spec.shape[0] - rank * size))


def _row_size(spec: TensorSpec) -> int:
    size = 1
    for extent in spec.shape[1:]:
        size *= extent
    return size
