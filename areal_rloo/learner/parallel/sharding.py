"""A policy spread over the learner's ranks: FSDP2, one group of parameters a layer.

Each rank holds a part of every float32 weight, gradient and optimizer state, cut along the first dimension; a layer is
whole only while it is computed. Gradients are summed, in float32, since a token's weight already is its share in the
mean over all ranks. With `replicas` above 1 that many copies of the policy are sharded over num / replicas ranks each,
so that layers are gathered within a copy (a node, say), and gradients alone are summed between copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over which devices parameters are spread, and where they lie while nothing is computed."""

    mesh: DeviceMesh
    offload: bool

    @classmethod
    def over(cls, ranks: Ranks, device: torch.device, *, replicas: int, offload: bool) -> Sharding | None:
        """None where one process has everything on its device: then there is nothing to spread.

        Args:
            ranks: of the learner.
            device: of this rank.
            replicas: copies of the policy; a divisor of the number of ranks.
            offload: whether parameters, gradients and optimizer states lie in CPU memory.
        """
        if ranks.num == 1 and not offload:
            return None
        names = ("replicate", "shard")
        shape = (replicas, ranks.num // replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        return cls(mesh if replicas > 1 else mesh["shard"], offload)

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks that hold one copy together, this one among them."""
        return self.mesh.get_group("shard")

    @property
    def in_first_copy(self) -> bool:
        """Whether rank 0 is among them."""
        return self.mesh.ndim == 1 or self.mesh.get_local_rank("replicate") == 0


def shard(policy: Policy, sharding: Sharding, *, dtype: torch.dtype) -> None:
    """Keep this rank's part of every parameter.

    Args:
        policy: with the same parameters on every rank, or on the meta device where `fill_shards` will give values.
        sharding: over which ranks.
        dtype: in which parameters are gathered to be computed with.
    """
    options: dict[str, Any] = {"mesh": sharding.mesh}
    if dtype == torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if sharding.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=sharding.mesh.device_type == "cuda")
    for layer in policy.causal.base_model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


@torch.no_grad()
def fill_shards(policy: Policy, whole: dict[str, Tensor], sharding: Sharding) -> None:
    """Give every rank its part of rank 0's values, a parameter at a time.

    Args:
        policy: sharded.
        whole: rank 0's parameters by name, emptied on the way; nothing on the others.
        sharding: as `shard` was given.
    """
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        source = whole.pop(name).detach() if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
        spread = distribute_tensor(source.to(sharding.mesh.device_type), sharding.mesh, parameter.placements)
        parameter.to_local().copy_(spread.to_local())


def norm_of_whole(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Clip the gradients to `max_norm` over all ranks; gives the norm they had, which may be NaN or infinite."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)


def with_product(weight: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """weight + scaling up down, sharded as the weight is; all three are sharded along their rows, or none is."""
    if not isinstance(weight, DTensor):
        return torch.addmm(weight, up, down, alpha=scaling)
    assert isinstance(up, DTensor), "all parameters are sharded, or none"
    assert isinstance(down, DTensor), "all parameters are sharded, or none"
    rows = up.to_local()
    local = torch.addmm(weight.to_local(), rows, down.full_tensor().to(rows.device), alpha=scaling)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
