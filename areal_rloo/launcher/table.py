"""A plan, shown: as a table for people, as JSON for programs."""

from __future__ import annotations

from collections import Counter

import msgspec

from areal_rloo.launcher.placement import Placement
from areal_rloo.launcher.plan import Plan, ProcessSpec

_TITLES = ("PROCESS", "ROLE", "HOST", "DEVICE", "CPUS", "MEMORY", "RESTARTS", "COMMAND")
_GIB = 2**30


def as_table(plan: Plan, placement: Placement) -> str:
    """A line a process, a line a host below."""
    rows = [_TITLES, *(_row(spec, plan) for spec in plan.processes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES) - 1)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return "\n".join([*lines, "", *_hosts(plan, placement)])


def as_json(plan: Plan, placement: Placement) -> str:
    """`{"hosts": [...], "processes": [...], "max_learner_restarts": n}`; one line."""
    return msgspec.json.encode(
        {
            "hosts": placement.hosts,
            "processes": plan.processes,
            "max_learner_restarts": plan.max_learner_restarts,
        }
    ).decode()


def _row(spec: ProcessSpec, plan: Plan) -> tuple[str, ...]:
    of_learner = spec in plan.learner
    return (
        spec.name,
        spec.role,
        spec.host,
        f"cuda:{','.join(spec.gpu_ids)}" if spec.gpu_ids else spec.device,
        str(spec.num_threads),
        f"{spec.memory_bytes / _GIB:.1f} GiB" if spec.memory_bytes else "-",
        str(plan.max_learner_restarts if of_learner else spec.max_restarts),
        " ".join(("python", *spec.command[1:])),
    )


def _hosts(plan: Plan, placement: Placement) -> list[str]:
    taken = Counter(spec.host for spec in (*plan.learner, *plan.workers))
    gpus = Counter({host.name: 0 for host in placement.hosts})
    for spec in (*plan.learner, *plan.workers):
        gpus[spec.host] += len(spec.gpu_ids)
    return [
        f"{host.name} ({host.address}): {taken[host.name]} processes, "
        f"{gpus[host.name]} of {len(host.gpu_ids)} GPUs, {host.num_cores} cores"
        for host in placement.hosts
    ]
