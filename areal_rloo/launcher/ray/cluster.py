"""A Ray cluster as a launcher sees it: hosts, reserved places, and processes owned by Ray.

Ray packs the learner's ranks together and spreads the rollout workers, in two placement groups. The nodes that Ray
chose become the placement of the plan. Each process has an owner, a Ray actor in the place of the process. If a worker,
its owner or their node dies, Ray restarts the owner, and the owner starts the process again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import areal_rloo
from areal_rloo.config import Config, LauncherConfig
from areal_rloo.errors import HostLostError, PreflightError
from areal_rloo.launcher.fit import model_sizes, resolved
from areal_rloo.launcher.hosts import capped
from areal_rloo.launcher.placement import Host, Placement, Seat, place
from areal_rloo.launcher.plan import JobRequest, ProcessSpec, on_network
from areal_rloo.launcher.processes import DRAIN_FIRST_S
from areal_rloo.launcher.ray.owner import ANSWER_TIMEOUT_S, Keeper, OwnedCommand, OwnedProcess, Owner
from areal_rloo.launcher.start import say_unused
from areal_rloo.waiting import wait_until

_LOOK_EVERY_S = 0.5
_SAY_FIRST_S = 5.0
_SAY_EVERY_S = 30.0
# Prefixes of the variables that the run's processes inherit.
_FORWARDED = ("AREAL_RLOO_", "HF_", "NCCL_", "GLOO_", "SGLANG_", "VLLM_", "WANDB_", "TORCH_")


class RayCluster:
    """A connection to a cluster. The end of the `with` block removes all places, and ends a cluster of this process."""

    def __init__(self, address: str | None, launcher: LauncherConfig, *, in_job: bool) -> None:
        """
        Args:
            address: of the cluster; None takes RAY_ADDRESS, else starts a cluster on this machine.
            in_job: True in a Ray job, for which Ray has copied the code already.

        Raises:
            PreflightError: there is no cluster at the address.
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
        self._folder = None if in_job else Path.cwd()  # working folder of the processes; None for Ray's own
        self._groups: list[PlacementGroup] = []
        self._keeper: Any = None

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        for group in self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        ray.shutdown()

    def hosts(self) -> list[Host]:
        """Wait for launcher.num_hosts nodes, and give all usable nodes.

        Raises:
            PreflightError: there are too few nodes after launcher.place_timeout_s.
        """
        num, num_gpus = self._launcher.num_hosts, self._launcher.gpus_per_host or 0

        def usable() -> list[Host]:
            return [host for host in _alive_nodes().values() if len(host.gpu_ids) >= num_gpus]

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
        """Reserve a place for every process, and read Ray's choice of nodes; the dashboard shows the name of the run.

        Raises:
            PreflightError: the cluster has too little room; the message says how much is missing.
        """
        hosts, model = self.hosts(), model_sizes(config, os.environ)
        written, config = config, resolved(config, hosts, model)
        wanted = place(config, hosts)
        say_unused(written, wanted, model)
        bundles = [_bundle(seat, wanted, config.learner.num_threads) for seat in wanted.learner]
        learner = self._reserve(wanted.learner, bundles, "PACK", f"{name}/learner")
        bundles = [_bundle(seat, wanted, config.rollout.num_threads) for seat in wanted.workers]
        workers = self._reserve(wanted.workers, bundles, "SPREAD", f"{name}/rollout")
        placement = Placement(tuple(_alive_nodes().values()), learner, workers)
        return on_network(config, placement), placement

    def reserve_ports(self, num: int) -> tuple[int, ...]:
        """Reserve ports of the learner's host until the end of the run."""
        in_place = _in_place(self._groups[0], 0)
        self._keeper = ray.remote(num_cpus=0)(Keeper).options(scheduling_strategy=in_place).remote()
        return tuple(ray.get(self._keeper.reserve.remote(num)))

    def starter(self, request: JobRequest) -> RayStarter:
        return RayStarter(request, self._groups, self._keeper, self._folder)

    def _reserve(
        self, seats: Sequence[Seat], bundles: list[dict[str, float]], strategy: str, name: str
    ) -> tuple[Seat, ...]:
        """Make a placement group, and move the seats to the nodes of Ray's choice. Ray assigns the GPUs later."""
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
        where, nodes = placement_group_table(group)["bundles_to_node_id"], _alive_nodes()
        return tuple(dataclasses.replace(seat, host=nodes[where[index]]) for index, seat in enumerate(seats))

    def _wait(self, condition: Callable[[], bool], missing: Callable[[], str]) -> bool:
        """Wait for the condition up to launcher.place_timeout_s, and print now and then what is missing."""
        say_s = _SAY_FIRST_S

        def say(waited_s: float) -> None:
            nonlocal say_s
            if waited_s >= say_s:
                print(f"waiting: {missing()}", file=sys.stderr, flush=True)  # noqa: T201 - the face of the program
                say_s = waited_s + _SAY_EVERY_S

        return wait_until(
            condition, timeout_s=self._launcher.place_timeout_s, look_every_s=_LOOK_EVERY_S, meanwhile=say
        )


class RayStarter:
    """Starts processes in places of a cluster, each with an owner. Ray restarts a dead owner `max_restarts` times."""

    restarts = True

    def __init__(self, request: JobRequest, groups: Sequence[PlacementGroup], keeper: Any, folder: Path | None) -> None:
        self._learner, self._workers = groups
        self._keeper = keeper
        self._request = request
        self._folder = folder
        server = request.config.rollout.server
        key = None if server is None else server.api_key_env
        self._variables = {name: v for name, v in os.environ.items() if name.startswith(_FORWARDED) or name == key}
        self._run_name = f"{request.folder.name}-{uuid.uuid4().hex[:6]}"  # unique in the cluster, also after a restart
        self._num_started = 0

    def start(self, spec: ProcessSpec, log: Path) -> OwnedProcess:
        """Start a process in the bundle of the same index. The warm start runs in the place of rank 0.

        Raises:
            HostLostError: the process is a rank of the learner, and the node is gone.
        """
        launcher = self._request.config.launcher
        kind, _, number = spec.name.partition("-")
        group, index = self._workers if kind == "rollout" else self._learner, int(number or 0)
        if group is self._learner and spec.host not in {host.name for host in _alive_nodes().values()}:
            raise HostLostError(
                f"{spec.name}: its node {spec.host} is gone, and with it the address that all others know; go "
                "on with areal-rloo resume RUN_FOLDER"
            )
        bundle = group.bundle_specs[index]
        self._num_started += 1
        owner = (
            ray.remote(concurrency_groups={"control": 1})(Owner)
            .options(
                name=f"{self._run_name}/{spec.name}/{self._num_started}",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=spec.max_restarts,
                scheduling_strategy=_in_place(group, index),
            )
            .remote()
        )
        command = OwnedCommand(
            spec=spec,
            run_folder=self._request.folder,
            log=log,
            folder=self._folder,
            variables=self._variables,
            guard_s=launcher.drain_timeout_s + DRAIN_FIRST_S,
        )
        return OwnedProcess(owner, command, place_timeout_s=launcher.place_timeout_s)

    def close(self) -> None:
        """Remove the shared memory of a killed learner."""
        with contextlib.suppress(RayError):
            ray.get(self._keeper.remove_abandoned.remote(), timeout=ANSWER_TIMEOUT_S)


def _alive_nodes() -> dict[str, Host]:
    """List the nodes of the cluster by id, except nodes without CPUs and GPUs, such as most head nodes."""
    hosts = {}
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and (resources.get("CPU", 0) or resources.get("GPU", 0)):
            hosts[node["NodeID"]] = Host(
                f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}",
                node["NodeManagerAddress"],
                max(1, int(resources.get("CPU", 1))),
                tuple(str(index) for index in range(int(resources.get("GPU", 0)))),
                int(resources.get("memory", 0)),
            )
    return hosts


def _in_place(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _bundle(seat: Seat, wanted: Placement, num_threads: int) -> dict[str, float]:
    """Describe the resources of a seat: the cores of the config, or a single core, to leave room for other runs.

    On a node with fewer cores than processes, each process gets a share of a core.
    """
    seats = [other for other in wanted.seats if other.host == seat.host]
    share = seat.host.num_cores / len(seats)
    cpus = float(min(num_threads or 1, int(share))) if share >= 1 else math.floor(1000 * share) / 1000
    return {"CPU": cpus} | ({"GPU": float(len(seat.gpu_ids))} if seat.gpu_ids else {})
