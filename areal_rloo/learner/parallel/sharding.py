"""Shard a policy over the learner's ranks (FSDP2, a parameter group per layer), and gather the whole weights on rank 0.

Each rank holds a part of every float32 weight, gradient and optimizer state, cut along the first dimension. A layer is
whole only during computation. Gradients are summed in float32: the weight of a token is already a share of the mean
over all ranks. With `replicas` above 1, each replica is sharded over num / replicas ranks; layers are gathered within a
replica (for example a node), and only gradients are summed between replicas.

Gathering fills the buckets of a broadcast bucket by bucket and never needs memory for a second model: rank 0 holds,
beside the buckets, the shards of a bucket from two ranks, the first being copied while the second arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.models.loading import decoder_layers
from areal_rloo.models.policy import Policy
from areal_rloo.weights.manifest import Manifest, TensorSpec, by_bucket, finish_copies, gather, views


@dataclass(frozen=True, slots=True)
class Sharding:
    """The device mesh that holds the parameters, and whether idle parameters are offloaded to CPU memory."""

    mesh: DeviceMesh
    offload: bool

    @classmethod
    def over(cls, ranks: Ranks, device: torch.device, *, replicas: int, offload: bool) -> Sharding | None:
        """Build the mesh; None if a single process holds everything on the device.

        `replicas` are copies of the policy, a divisor of the number of ranks. `offload` keeps parameters, gradients and
        optimizer states in CPU memory.
        """
        if ranks.num == 1 and not offload:
            return None
        shape = (replicas, ranks.num // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        return cls(mesh if replicas > 1 else mesh["shard"], offload)

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks that share a replica with this rank."""
        return self.mesh.get_group("shard")


def shard(policy: Policy, sharding: Sharding, *, dtype: torch.dtype) -> None:
    """Keep only this rank's part of every parameter; gathered parameters have the dtype, for computation.

    The policy has the same parameters on every rank, or is on the meta device if `fill_shards` follows.
    """
    options: dict[str, Any] = {"mesh": sharding.mesh}
    if dtype == torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if sharding.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=sharding.mesh.device_type == "cuda")
    for layer in decoder_layers(policy.causal):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


@torch.no_grad()
def fill_shards(policy: Policy, whole: dict[str, Tensor], sharding: Sharding) -> None:
    """Distribute rank 0's values to all ranks, a tensor at a time.

    `whole` has parameters and buffers by name on rank 0, removed as they are distributed, and is empty on other ranks.
    """
    for owner_name, owner in policy.named_modules():
        for name, buffer in owner.named_buffers(
            recurse=False
        ):  # such as rotary frequencies; on the device also offloaded
            value = whole.pop(f"{owner_name}.{name}") if whole else torch.empty_like(buffer)
            copies = [Replicate()] * sharding.mesh.ndim
            spread = distribute_tensor(value.to(sharding.mesh.device_type), sharding.mesh, copies)
            setattr(owner, name, spread.to_local())
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        source = whole.pop(name).detach() if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
        spread = distribute_tensor(source.to(sharding.mesh.device_type), sharding.mesh, parameter.placements)
        parameter.to_local().copy_(spread.to_local())


def first_row(tensor: DTensor) -> int:
    """Return the place of this rank's first row in the whole tensor, cut as torch.chunk does."""
    mesh = tensor.device_mesh
    num, rank = mesh["shard"].size(), mesh.get_local_rank("shard")
    return min(rank * -(-tensor.shape[0] // num), tensor.shape[0])


def is_written_here(tensor: DTensor, index: int) -> bool:
    """Return True if the replica of this rank writes the tensor with this index: the replicas share the tensors."""
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or index % mesh["replicate"].size() == mesh.get_local_rank("replicate")


def clip_to_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Clip the gradients to `max_norm` over all ranks; return the norm before, which may be NaN or infinite."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_product(weight: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """Compute weight + scaling up down, sharded like the weight; all three are sharded along rows, or none."""
    if not isinstance(weight, DTensor):
        return torch.addmm(weight, up, down, alpha=scaling)
    assert isinstance(up, DTensor) and isinstance(down, DTensor), "all parameters are sharded, or none"
    rows = up.to_local()
    local = torch.addmm(weight.to_local(), rows, down.full_tensor().to(rows.device), alpha=scaling)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@torch.no_grad()
def gather_weights(
    manifest: Manifest,
    named: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Tensor] | None,
    sharding: Sharding | None,
) -> None:
    """Fill the buckets with whole tensors. Every rank calls this; only rank 0 has buckets, [num_bytes] uint8 each.
    They are whole on return.

    `named` gives names and tensors in manifest order; sharded tensors are cut along the first dimension.
    """
    if sharding is None:
        assert buckets is not None, "the only rank has the buckets"
        gather(manifest, named, buckets)
    elif sharding.mesh.ndim == 1 or sharding.mesh.get_local_rank("replicate") == 0:  # the replica of rank 0
        _gather_shards(manifest, named, buckets, sharding)


def _gather_shards(
    manifest: Manifest, named: Iterable[tuple[str, Tensor]], buckets: Sequence[Tensor] | None, sharding: Sharding
) -> None:
    places = None if buckets is None else dict(views(manifest, buckets))
    tensors = iter(named)
    for specs in by_bucket(manifest):
        shards = []
        for spec in specs:
            name, tensor = next(tensors)
            assert name == spec.name, f"the policy has {name} at the place of {spec.name} in the manifest"
            assert isinstance(tensor, DTensor), f"{name} is not sharded"
            shards.append(tensor.to_local())
        _gather_bucket(specs, shards, places, sharding)  # a separate call: temporaries are freed before the next
    finish_copies([torch.device(sharding.mesh.device_type)])


def _gather_bucket(
    specs: Sequence[TensorSpec], shards: Sequence[Tensor], places: Mapping[str, Tensor] | None, sharding: Sharding
) -> None:
    """Gather a bucket on rank 0. `dist.gather` is not used: Gloo would allocate a second copy of all received data."""
    group = sharding.shards
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [[_rows(spec, of_rank, num) * math.prod(spec.shape[1:]) for spec in specs] for of_rank in range(num)]
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
    coming = _receive(1, sizes, specs, sharding)
    _copy(shards, own)
    for of_rank, theirs in enumerate(others, start=1):
        received, work = coming
        coming = _receive(of_rank + 1, sizes, specs, sharding)
        if work is not None:
            work.wait()
        _copy(received.split(sizes[of_rank]), theirs)


def _receive(
    rank: int, sizes: Sequence[Sequence[int]], specs: Sequence[TensorSpec], sharding: Sharding
) -> tuple[Tensor, dist.Work | None]:
    """Start receiving the shards of a rank; no work if the rank has no rows or does not exist."""
    received = _flat(specs, sizes[rank] if rank < len(sizes) else (), sharding)
    work = dist.irecv(received, group=sharding.shards, group_src=rank) if len(received) else None
    return received, work


def _flat(specs: Sequence[TensorSpec], sizes: Sequence[int], sharding: Sharding) -> Tensor:
    return torch.empty(sum(sizes), dtype=getattr(torch, specs[0].dtype), device=sharding.mesh.device_type)


def _copy(parts: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for part, place in zip(parts, places, strict=True):
        place.copy_(part.flatten(), non_blocking=True)


def _rows(spec: TensorSpec, rank: int, num_ranks: int) -> int:
    """Count the rows in the shard of a rank, cut as torch.chunk does."""
    size = -(-spec.shape[0] // num_ranks)
    return max(0, min(size, spec.shape[0] - rank * size))
