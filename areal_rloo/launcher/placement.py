"""From a config and hosts to seats: which process sits where, with which GPUs and how many cores. Pure functions.

    hosts ─► with_counts (what is `auto`) ─► place ─► a seat for each learner rank and each rollout worker

The learner's ranks are packed onto the first hosts, since they talk to each other all the time; the workers are spread
over what is left, since they talk to nobody but the learner. A worker's GPUs are all on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from areal_rloo.config import Config, validate
from areal_rloo.errors import PreflightError

_LEARNER_SHARE = 4  # one GPU in so many learns, where the counts are auto: generating takes the most time


@dataclass(frozen=True, slots=True)
class Host:
    """What a host offers to this run. `memory_bytes` is 0 where nobody knows it."""

    name: str
    address: str
    num_cores: int
    gpu_ids: tuple[str, ...] = ()
    memory_bytes: int = 0


_Place = tuple[Host, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one process."""

    host: Host
    gpu_ids: tuple[str, ...]
    num_threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A seat for each process, learner ranks and rollout workers in their order."""

    hosts: tuple[Host, ...]
    learner: tuple[Seat, ...]
    workers: tuple[Seat, ...]

    @property
    def learner_host(self) -> Host:
        """Of rank 0, which all others talk to."""
        return self.learner[0].host

    @property
    def used_hosts(self) -> tuple[Host, ...]:
        """Those somebody sits on, in their order."""
        taken = {seat.host.name for seat in (*self.learner, *self.workers)}
        return tuple(host for host in self.hosts if host.name in taken)


def with_counts(config: Config, hosts: Sequence[Host]) -> Config:
    """The config with numbers where it says `auto`.

    On GPUs, a quarter of them learn (as many as `learner.num_replicas` divides, at least one) and the others generate,
    `rollout.tensor_parallel` to a worker. Without, one rank learns and each host has a worker.

    Raises:
        ConfigError: what came out does not fit the rest of the config.
    """
    num_ranks, num_workers = config.learner.num_ranks, config.rollout.num_workers
    if num_ranks and num_workers:
        return config
    num_gpus = sum(len(host.gpu_ids) for host in hosts)
    rank_gpus, worker_gpus = _gpus_each(config, hosts)
    if not num_ranks:
        replicas = config.learner.num_replicas
        taken = num_workers * worker_gpus
        free = (num_gpus - taken) if num_workers else num_gpus // _LEARNER_SHARE
        num_ranks = max(1, free // replicas) * replicas if rank_gpus else replicas
    if not num_workers:
        if config.rollout.server_urls:
            num_workers = len(config.rollout.server_urls)
        elif worker_gpus:
            left = _left_by_learner(hosts, num_ranks * rank_gpus)
            num_workers = max(1, sum(gpus // worker_gpus for gpus in left))
        else:
            num_workers = len(hosts)
    counted = msgspec.structs.replace(
        config,
        learner=msgspec.structs.replace(config.learner, num_ranks=num_ranks),
        rollout=msgspec.structs.replace(config.rollout, num_workers=num_workers),
    )
    validate(counted)
    return counted


def place(config: Config, hosts: Sequence[Host]) -> Placement:
    """Seats for all processes of a config whose counts are numbers.

    Cores are shared evenly among the processes of a host where the config says 0, memory by cores.

    Raises:
        PreflightError: a device was asked for that the hosts do not have; says by how much.
    """
    rank_gpus, worker_gpus = _gpus_each(config, hosts)
    free = {host.name: list(host.gpu_ids) for host in hosts}
    learner = _packed(hosts, free, [rank_gpus] * config.learner.num_ranks)
    workers = None if learner is None else _spread(hosts, free, [worker_gpus] * config.rollout.num_workers, learner)
    if learner is None or workers is None:
        raise PreflightError(_too_few(config, hosts, rank_gpus, worker_gpus))
    num_seats = {host.name: 0 for host in hosts}
    for host, _ in (*learner, *workers):
        num_seats[host.name] += 1

    def seat(host: Host, gpu_ids: tuple[str, ...], num_threads: int) -> Seat:
        share = num_seats[host.name]
        return Seat(host, gpu_ids, num_threads or max(1, host.num_cores // share), host.memory_bytes // share)

    return Placement(
        tuple(hosts),
        tuple(seat(*one, config.learner.num_threads) for one in learner),
        tuple(seat(*one, config.rollout.num_threads) for one in workers),
    )


def _packed(hosts: Sequence[Host], free: dict[str, list[str]], wanted: Sequence[int]) -> list[_Place] | None:
    """Each on the first host that has room; on CPUs all on the first, up to its cores."""
    places: list[_Place] = []
    for num_gpus in wanted:
        if num_gpus:
            host = next((host for host in hosts if len(free[host.name]) >= num_gpus), None)
        else:
            host = min(hosts, key=lambda host: sum(there is host for there, _ in places) // max(1, host.num_cores))
        if host is None:
            return None
        places.append((host, _taken(free, host, num_gpus)))
    return places


def _spread(
    hosts: Sequence[Host], free: dict[str, list[str]], wanted: Sequence[int], before: Sequence[_Place]
) -> list[_Place] | None:
    """Each on the host with the most free GPUs, or, on CPUs, with the most cores for each process there."""
    places = list(before)
    for num_gpus in wanted:
        if num_gpus:
            host = max(hosts, key=lambda host: len(free[host.name]))
            if len(free[host.name]) < num_gpus:
                return None
        else:
            host = max(hosts, key=lambda host: host.num_cores / (1 + sum(there is host for there, _ in places)))
        places.append((host, _taken(free, host, num_gpus)))
    return places[len(before) :]


def _taken(free: dict[str, list[str]], host: Host, num_gpus: int) -> tuple[str, ...]:
    gpu_ids, free[host.name] = free[host.name][:num_gpus], free[host.name][num_gpus:]
    return tuple(gpu_ids)


def _left_by_learner(hosts: Sequence[Host], num_taken: int) -> list[int]:
    left = []
    for host in hosts:
        taken = min(num_taken, len(host.gpu_ids))
        num_taken -= taken
        left.append(len(host.gpu_ids) - taken)
    return left


def _gpus_each(config: Config, hosts: Sequence[Host]) -> tuple[int, int]:
    """GPUs of each learner rank and of each worker; those of a server that runs already are not ours to give."""
    there = any(host.gpu_ids for host in hosts)

    def wants(device: str) -> int:
        return int(there) if device == "auto" else int(device.startswith("cuda"))

    worker_gpus = 0 if config.rollout.server_urls else wants(config.rollout.device) * config.rollout.tensor_parallel
    return wants(config.learner.device), worker_gpus


def _too_few(config: Config, hosts: Sequence[Host], rank_gpus: int, worker_gpus: int) -> str:
    num_ranks, num_workers = config.learner.num_ranks, config.rollout.num_workers
    wanted = num_ranks * rank_gpus + num_workers * worker_gpus
    there = sum(len(host.gpu_ids) for host in hosts)
    asked = (
        f"learner.device={config.learner.device}, learner.num_ranks={num_ranks}, "
        f"rollout.device={config.rollout.device}, rollout.num_workers={num_workers}, "
        f"rollout.tensor_parallel={config.rollout.tensor_parallel}"
    )
    have = f"this machine has {there}" if len(hosts) == 1 else f"the {len(hosts)} hosts have {there}"
    if wanted > there:
        short = f"{have}, {wanted - there} too few"
    else:
        short = f"{have}, but not {worker_gpus} together for each worker (GPUs of a worker are all on one host)"
    return (
        f"devices: the plan needs {wanted} GPUs ({asked}), {short}; lower learner.num_ranks, rollout.num_workers or "
        "rollout.tensor_parallel, raise launcher.num_hosts, or set a device to cpu"
    )
