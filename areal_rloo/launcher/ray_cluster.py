"""A Ray cluster as a launcher needs it: hosts, places, and processes that Ray owns.

Ray places the learner's ranks together and the rollout workers apart, in two placement groups, and says where they came
to be; that makes the placement of the plan. Each process belongs to an owner, a Ray object of its own in the place of
the process: where a worker dies, or its owner, or their node, Ray makes the owner anew, and that starts the process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

import areal_rloo
from areal_rloo.config import Config, LauncherConfig
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.hosts import capped
from areal_rloo.launcher.job import JobRequest
from areal_rloo.launcher.placement import Host, Placement, Seat, place, with_counts
from areal_rloo.launcher.plan import on_network
from areal_rloo.launcher.ray_nodes import alive_nodes, in_place
from areal_rloo.launcher.ray_owner import Keeper
from areal_rloo.launcher.ray_starter import RayStarter

_LOOK_EVERY_S = 0.5
_SAY_FIRST_S = 5.0
_SAY_EVERY_S = 30.0


class RayCluster:
    """A connection; as a context manager it gives everything back at its end, and ends a cluster that it started."""

    def __init__(self, address: str | None, launcher: LauncherConfig, *, in_job: bool) -> None:
        """
        Args:
            address: None for RAY_ADDRESS, or, without that, a cluster of our own on this machine.
            launcher: the section.
            in_job: whether Ray started us, as a job; then it has the code already.

        Raises:
            PreflightError: there is no cluster at this address.
        """
        self._launcher = launcher
        address = address or os.environ.get("RAY_ADDRESS")
        carries_code = address is not None and not in_job
        code = {"py_modules": [str(Path(areal_rloo.__file__).parent)]} if carries_code else {}
        try:
            ray.init(
                address=address or "local",
                namespace="areal_rloo",
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env=code,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PreflightError(f"--address: no Ray cluster at {address}: {error}") from error
        self._folder = None if in_job else Path.cwd()
        self._groups: list[PlacementGroup] = []
        self._keeper: Any = None

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        ray.shutdown()

    def hosts(self) -> list[Host]:
        """The nodes with all that they have, once there are launcher.num_hosts.

        Raises:
            PreflightError: there are too few for too long.
        """
        num, num_gpus = self._launcher.num_hosts, self._launcher.gpus_per_host or 0

        def usable() -> list[Host]:
            return [host for host in alive_nodes().values() if len(host.gpu_ids) >= num_gpus]

        kind = f"with launcher.gpus_per_host={num_gpus} GPUs " if num_gpus else ""
        if not self._wait(
            lambda: len(usable()) >= num,
            lambda: f"{len(usable())} of launcher.num_hosts={num} Ray nodes {kind}are there",
        ):
            raise PreflightError(
                f"launcher.num_hosts: expected {num} Ray nodes {kind}within launcher.place_timeout_s="
                f"{self._launcher.place_timeout_s:g}, {len(usable())} are there; add nodes, or lower it"
            )
        return [capped(host, self._launcher) for host in usable()]

    def place(self, config: Config, *, name: str) -> tuple[Config, Placement]:
        """Reserve a place for every process, and say where Ray put them.

        Args:
            config: of the run.
            name: of the run, for Ray's dashboard.

        Raises:
            PreflightError: there is not room for all; says how much is missing.
        """
        hosts = self.hosts()
        config = with_counts(config, hosts)
        wanted = place(config, hosts)
        bundles = [_bundle(seat, wanted, config.learner.num_threads) for seat in wanted.learner]
        packed = self._reserve(bundles, "PACK", f"{name}/learner")
        bundles = [_bundle(seat, wanted, config.rollout.num_threads) for seat in wanted.workers]
        spread = self._reserve(bundles, "SPREAD", f"{name}/rollout")
        nodes = alive_nodes()
        placement = Placement(
            tuple(nodes.values()), _seated(wanted.learner, packed, nodes), _seated(wanted.workers, spread, nodes)
        )
        return on_network(config, placement), placement

    def reserve_ports(self, num: int) -> tuple[int, ...]:
        """Ports on the learner's host, held until the end of the run."""
        self._keeper = ray.remote(num_cpus=0)(Keeper).options(scheduling_strategy=in_place(self._groups[0], 0)).remote()
        ports: tuple[int, ...] = tuple(ray.get(self._keeper.reserve.remote(num)))
        return ports

    def starter(self, request: JobRequest) -> RayStarter:
        """Starts the processes of this run in the places that were reserved."""
        learner, workers = self._groups
        return RayStarter(request, learner=learner, workers=workers, keeper=self._keeper, folder=self._folder)

    def _reserve(self, bundles: list[dict[str, float]], strategy: str, name: str) -> list[str]:
        """A placement group; gives the id of the node of each bundle."""
        group = placement_group(bundles, strategy=strategy, name=name)
        self._groups.append(group)

        def missing() -> str:
            needed = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
            free = ray.available_resources()
            words = [f"{kind}s: {n:g} needed, {free.get(kind, 0):g} free" for kind, n in needed.items() if n]
            return f"no room for {len(bundles)} processes of {name} ({'; '.join(words)})"

        if not self._wait(lambda: bool(group.wait(_LOOK_EVERY_S)), missing):
            raise PreflightError(
                f"{missing()}; wait for other runs, add nodes, or lower rollout.num_workers or learner.num_ranks"
            )
        where = placement_group_table(group)["bundles_to_node_id"]
        return [where[index] for index in range(len(bundles))]

    def _wait(self, condition: Any, what: Any) -> bool:
        """Until the condition holds, or launcher.place_timeout_s; says now and then what it waits for."""
        began_s = time.monotonic()
        say_s = began_s + _SAY_FIRST_S
        while not condition():
            now_s = time.monotonic()
            if now_s - began_s > self._launcher.place_timeout_s:
                return False
            if now_s >= say_s:
                print(f"waiting: {what()}", file=sys.stderr, flush=True)  # noqa: T201 - the face of the program
                say_s = now_s + _SAY_EVERY_S
            time.sleep(_LOOK_EVERY_S)
        return True


def _bundle(seat: Seat, wanted: Placement, num_threads: int) -> dict[str, float]:
    """What a seat needs of its node: the cores that the config says, or one, so that it fits beside other runs. Where a
    node has fewer, each process has its share."""
    seats = [other for other in (*wanted.learner, *wanted.workers) if other.host == seat.host]
    share = seat.host.num_cores / len(seats)
    cpus = float(min(num_threads or 1, int(share))) if share >= 1 else math.floor(1000 * share) / 1000
    return {"CPU": cpus} | ({"GPU": float(len(seat.gpu_ids))} if seat.gpu_ids else {})


def _seated(seats: Sequence[Seat], node_ids: Sequence[str], nodes: dict[str, Host]) -> tuple[Seat, ...]:
    """The seats on the hosts where Ray put them; which of a host's GPUs each has, Ray says to its owner."""
    return tuple(
        Seat(nodes[node_id], seat.gpu_ids, seat.num_threads, seat.memory_bytes)
        for seat, node_id in zip(seats, node_ids, strict=True)
    )
