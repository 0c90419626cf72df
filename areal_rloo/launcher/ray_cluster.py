"""A Ray cluster as a launcher needs it: hosts, places, and processes that Ray owns. The only module that knows Ray.

Ray places the learner's ranks together and the rollout workers apart, in two placement groups, and says where they came
to be; that makes the placement of the plan. Each process belongs to an owner, a Ray object of its own in the place of
the process: where a worker dies, or its owner, or their node, Ray makes the owner anew, and that starts the process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import areal_rloo
from areal_rloo.config import Config, LauncherConfig
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.hosts import ReservedPorts, capped
from areal_rloo.launcher.job import JobRequest
from areal_rloo.launcher.placement import Host, Placement, Seat, place, with_counts
from areal_rloo.launcher.plan import ProcessSpec, on_network
from areal_rloo.launcher.processes import LocalProcess
from areal_rloo.launcher.tail import Tail
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_FORWARDED = ("AREAL_RLOO_", "HF_", "NCCL_", "GLOO_", "SGLANG_", "WANDB_", "TORCH_")  # variables that owners get too
_ANSWER_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.5
_SAY_FIRST_S = 5.0
_SAY_EVERY_S = 30.0
_POLL_EVERY_S = 0.2
_LOST = 137  # the code of a process that is gone with its owner, as if killed


class RayCluster:
    """A connection; as a context manager it gives everything back at its end, and ends a cluster that it started."""

    def __init__(self, address: str | None, launcher: LauncherConfig, *, in_job: bool) -> None:
        """
        Args:
            address: None for RAY_ADDRESS, or, without that, a cluster of our own on this machine.
            launcher: the section.
            in_job: whether Ray started us, as a job; then it has code and variables already.

        Raises:
            PreflightError: there is no cluster at this address.
        """
        self._launcher = launcher
        address = address or os.environ.get("RAY_ADDRESS")
        runtime_env: dict[str, Any] = {}
        if not in_job:
            variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
            runtime_env["env_vars"] = variables
            if address is not None:
                runtime_env["py_modules"] = [str(Path(areal_rloo.__file__).parent)]
        try:
            ray.init(
                address=address or "local",
                namespace="areal_rloo",
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env=runtime_env,
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
            return [host for host in _nodes().values() if len(host.gpu_ids) >= num_gpus]

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
        nodes = _nodes()
        placement = Placement(
            tuple(nodes.values()), _seated(wanted.learner, packed, nodes), _seated(wanted.workers, spread, nodes)
        )
        return on_network(config, placement), placement

    def reserve_ports(self, num: int) -> tuple[int, ...]:
        """Ports on the learner's host, held until the end of the run."""
        self._keeper = (
            ray.remote(num_cpus=0)(_Keeper).options(scheduling_strategy=_in_place(self._groups[0], 0)).remote()
        )
        ports: tuple[int, ...] = tuple(ray.get(self._keeper.reserve.remote(num)))
        return ports

    def starter(self, request: JobRequest) -> RayStarter:
        """Starts the processes of this run in the places that were reserved."""
        learner, workers = self._groups
        places = {f"rollout-{index}": (workers, index) for index in range(len(request.placement.workers))}
        places |= {f"learner-{rank}": (learner, rank) for rank in range(len(request.placement.learner))}
        places |= {"learner": (learner, 0), "warm_start": (learner, 0)}
        return RayStarter(places, self._keeper, request, self._folder)

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


class RayStarter:
    """Starts processes in places of a cluster, each with an owner."""

    restarts = True

    def __init__(
        self,
        places: dict[str, tuple[PlacementGroup, int]],
        keeper: Any,
        request: JobRequest,
        folder: Path | None,
    ) -> None:
        self._places = places
        self._keeper = keeper
        self._request = request
        self._folder = folder
        self._learner = {f"learner-{rank}" for rank in range(len(request.placement.learner))} | {"learner"}
        self._run_name = f"{request.folder.name}-{uuid.uuid4().hex[:6]}"  # of this start: names are unique in a cluster
        self._num_started = 0

    def start(self, spec: ProcessSpec, log: Path) -> OwnedProcess:
        """Start a process whose output is appended to a file.

        Raises:
            PreflightError: it is of the learner, and its node is gone.
        """
        if spec.name in self._learner and spec.host not in {host.name for host in _nodes().values()}:
            raise PreflightError(
                f"{spec.name}: its node {spec.host} is gone, and with it the address that all others know; start the "
                "run again with --resume"
            )
        group, index = self._places[spec.name]
        bundle = group.bundle_specs[index]
        self._num_started += 1
        owner = (
            ray.remote(concurrency_groups={"control": 1})(_Owner)
            .options(
                name=f"{self._run_name}/{spec.name}/{self._num_started}",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=spec.max_restarts,
                scheduling_strategy=_in_place(group, index),
            )
            .remote()
        )
        return OwnedProcess(owner, owner.run.remote(spec, self._request.folder, log, self._folder), spec, log)

    def close(self) -> None:
        """Remove what the learner had in its host's memory."""
        with contextlib.suppress(RayError):
            ray.get(self._keeper.remove.remote(self._request.addresses.segment_folder), timeout=_ANSWER_TIMEOUT_S)


class OwnedProcess:
    """A process somewhere in the cluster, seen through its owner."""

    def __init__(self, owner: Any, ending: ray.ObjectRef[tuple[int, str]], spec: ProcessSpec, log: Path) -> None:
        self._owner = owner
        self._ending = ending
        self._log = log
        self._code: int | None = None
        self.label = f"in Ray, on {spec.host}"

    def exit_code(self) -> int | None:
        """None while it runs, or while Ray makes its owner anew."""
        if self._code is None and ray.wait([self._ending], timeout=0)[0]:
            try:
                self._code, words = ray.get(self._ending)
            except RayError as error:  # the owner is gone, and Ray will not make it anew any more
                self._code, words = _LOST, str(error).strip().splitlines()[-1]
            ray.kill(self._owner)  # its place is free for the next one
            if words:
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(words + "\n")
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs; nobody waits for it to arrive."""
        if self.exit_code() is None:
            self._owner.signal.remote(number)

    def kill(self) -> None:
        """End the process and all of its session, then its owner."""
        with contextlib.suppress(RayError):
            if self.exit_code() is not None:
                return
            ray.get(self._owner.kill.remote(), timeout=_ANSWER_TIMEOUT_S)
        ray.kill(self._owner)
        self._code = _LOST if self._code is None else self._code


class _Owner:
    """Runs one process where Ray put it. Ray makes it anew after it ended by itself, and calls `run` again."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._told_to_end = False

    @ray.method(max_task_retries=-1)  # as often as Ray makes it anew
    def run(self, spec: ProcessSpec, run_folder: Path, log: Path, folder: Path | None) -> tuple[int, str]:
        """The process, from its start to its end; gives its exit code, and words where it could not be started."""
        if not (run_folder / "config.yaml").is_file():
            return 2, (
                f"error: run.folder: {run_folder} is not there on {ray.util.get_node_ip_address()}; "
                "it must lie on a file system that all hosts share"
            )
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONBREAK"))
        }
        environment |= spec.environment
        if spec.gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))  # those that Ray chose
        tails = [Tail(log), Tail(log.with_suffix(".log"))]
        with log.open("ab") as output:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                output.write(f"{spec.name} is started again by Ray\n".encode())
                output.flush()
            self._process = LocalProcess(
                (sys.executable, *spec.command[1:]),
                environment,
                output,
                folder=folder if folder is not None and folder.is_dir() else None,
            )
        print(f"{spec.name}: {self._process.label}, logs in {log.parent}", flush=True)  # noqa: T201 - for the dashboard
        while (code := self._process.exit_code()) is None:
            time.sleep(_POLL_EVERY_S)
            for tail in tails:
                sys.stdout.write(tail.read())
        print(f"{spec.name} ended with code {code}", flush=True)  # noqa: T201
        if spec.max_restarts and code not in (0, 2) and not self._told_to_end:
            self._process.kill()  # what it may have left
            os._exit(1)  # Ray's own way of starting again, as if the node had gone
        return code, ""

    @ray.method(concurrency_group="control")
    def signal(self, number: int) -> None:
        """Pass a signal on."""
        self._told_to_end = True
        if self._process is not None:
            self._process.signal(number)

    @ray.method(concurrency_group="control")
    def kill(self) -> None:
        """End the process and all of its session."""
        self._told_to_end = True
        if self._process is not None:
            self._process.kill()


class _Keeper:
    """Sits on the learner's host, and holds what the run has there beside its processes."""

    def reserve(self, num: int) -> tuple[int, ...]:
        """Ports, for as long as this lives."""
        self._reserved = ReservedPorts(num)
        return self._reserved.ports

    def remove(self, folder: Path) -> None:
        """A folder that is of no use any more."""
        shutil.rmtree(folder, ignore_errors=True)


def _nodes() -> dict[str, Host]:
    """The cluster's nodes by their ids, but for those that offer nothing, as a head often does."""
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


def _bundle(seat: Seat, wanted: Placement, num_threads: int) -> dict[str, float]:
    """What a seat needs of its node: the cores that the config says, or one, so that it fits beside other runs. Where a
    node has fewer, each process has its share."""
    seats = [other for other in (*wanted.learner, *wanted.workers) if other.host == seat.host]
    share = seat.host.num_cores / len(seats)
    cpus = float(num_threads or 1) if share >= 1 else math.floor(1000 * share) / 1000
    return {"CPU": cpus} | ({"GPU": float(len(seat.gpu_ids))} if seat.gpu_ids else {})


def _seated(seats: Sequence[Seat], node_ids: Sequence[str], nodes: dict[str, Host]) -> tuple[Seat, ...]:
    """The seats on the hosts where Ray put them; which of a host's GPUs each has, Ray says to its owner."""
    return tuple(
        Seat(nodes[node_id], seat.gpu_ids, seat.num_threads, seat.memory_bytes)
        for seat, node_id in zip(seats, node_ids, strict=True)
    )


def _in_place(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
