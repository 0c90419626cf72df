"""Tells the user of a config for GPUs on a machine without a GPU which GPUs the config needs. Pure functions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from areal_rloo.config import Config
from areal_rloo.errors import UserError
from areal_rloo.launcher.fit import Planned, planned, planned_well
from areal_rloo.launcher.host_memory import host_parts
from areal_rloo.launcher.placement import Host, place
from areal_rloo.launcher.remedies import Remedy, assign
from areal_rloo.models.sizes import Sizes

_COUNTS = (1, 2, 3, 4, 8, 16, 32, 64)
_GIGABYTES = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 180)
_ON_A_HOST = 8


def gpu_need(config: Config, hosts: Sequence[Host], model: Sizes | None) -> str:
    """Say which GPUs a config needs, if no host has a GPU; empty for a config without a server and without `cuda`.

    A server of the tiny model needs no GPU, and `rollout.device: cpu` asks for none.
    """
    rollout = config.rollout
    if any(host.gpu_ids for host in hosts):
        return ""
    devices = {"learner.device": config.learner.device, "rollout.device": rollout.device}
    on_cuda = [key for key, device in devices.items() if device == "cuda"]
    because = [f"{key}=cuda" for key in on_cuda]
    runs_server = rollout.server is not None and not rollout.server_urls and rollout.device != "cpu"
    if runs_server and config.model.path != "tiny":
        because.append(f"rollout.engine={rollout.engine}")
    if not because:
        return ""
    where = hosts[0].name if len(hosts) == 1 else f"the {len(hosts)} hosts"
    changes = [assign("rollout.engine", "embedded", "embedded")] if runs_server else []
    changes += [assign(key, "auto", "auto") for key in on_cuda]
    here = f"set {' '.join(change.words for change in changes)} (slow on a CPU), or "
    return (
        f"no GPU on {where}: {' with '.join(because)} needs {_least_gpus(config, model)}; start where GPUs are, or "
        f"{here if _fits_here(config, changes, hosts, model) else ''}begin with --config quickstart.yaml"
    )


def _fits_here(config: Config, changes: Sequence[Remedy], hosts: Sequence[Host], model: Sizes | None) -> bool:
    """Return True unless the hosts have too little memory for all processes of the changed config, on CPUs."""
    for change in changes:
        config = change.change(config)
    least = min(host.memory_bytes for host in hosts)
    if model is None or not least:  # unknown
        return True
    try:
        found = planned(config, hosts, model)
        parts = host_parts(found, place(found, hosts), model, model.num_parameters)
    except UserError:
        return False
    return sum(parts.values()) <= least


def _least_gpus(config: Config, model: Sizes | None) -> str:
    """Name the fewest GPUs, and of these the smallest usual ones, with an accepted plan, and with a good cache."""
    if model is None:
        return "a GPU"
    least, good = (_least(config, model, plan) for plan in (planned, planned_well))
    if least is None:
        return f"more than {_COUNTS[-1]} GPUs of {_GIGABYTES[-1]} GB"
    better = "" if good in (None, least) else f", better {_counted(good[0])} of {good[1]} GB"
    return f"{_counted(least[0])} of {least[1]} GB or more{better}"


def _least(config: Config, model: Sizes, plan: Planned) -> tuple[int, int] | None:
    for count, gigabytes in itertools.product(_COUNTS, _GIGABYTES):
        with contextlib.suppress(UserError):
            plan(config, _described(count, gigabytes), model)
            return count, gigabytes
    return None


def _counted(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"


def _described(count: int, gigabytes: int) -> list[Host]:
    each = min(count, _ON_A_HOST)
    ids = tuple(map(str, range(each)))
    return [Host(f"host-{index}", "", each, ids, 0, gigabytes * 10**9) for index in range(count // each)]
