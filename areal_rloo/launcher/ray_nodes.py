"""The nodes of a Ray cluster as hosts, and how a place in a placement group is asked for."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_rloo.launcher.placement import Host


def alive_nodes() -> dict[str, Host]:
    """By their ids, with all that they have, but for those that offer nothing, as a head often does."""
    hosts = {}
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and (resources.get("CPU", 0) or resources.get("GPU", 0)):
            gpu_ids = tuple(str(index) for index in range(int(resources.get("GPU", 0))))
            name, address = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}", node["NodeManagerAddress"]
            hosts[node["NodeID"]] = Host(
                name, address, max(1, int(resources.get("CPU", 1))), gpu_ids, int(resources.get("memory", 0))
            )
    return hosts


def in_place(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Where a bundle of the group was put."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
