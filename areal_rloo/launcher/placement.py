"""Gives each process of a run a seat: a host, GPUs and cores. Pure functions.

    hosts ─► with_counts (replaces `auto`) ─► place ─► a seat for each learner rank and each rollout worker

The learner's ranks are packed onto the first hosts, because they communicate all the time. The workers are spread over
the free GPUs, because they communicate with the learner only. All GPUs of a worker are on the same host.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from areal_rloo.config import MOST_WORKERS, Config, validate
from areal_rloo.errors import ConfigError, PreflightError

_LEARNER_SHARE = 4  # with `auto` counts, a quarter of the GPUs learns: generation takes the most time


class TooFewError(PreflightError):
    """The hosts have too few GPUs for the processes. The advice is left to `fit`, which can try it."""


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of a host for this run. Bytes are 0 if unknown; `gpu_bytes` are of the smallest GPU."""

    name: str
    address: str
    num_cores: int
    gpu_ids: tuple[str, ...] = ()
    memory_bytes: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a process."""

    host: Host
    gpu_ids: tuple[str, ...]
    num_threads: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A seat for each learner rank and each rollout worker, in order."""

    hosts: tuple[Host, ...]
    learner: tuple[Seat, ...]
    workers: tuple[Seat, ...]

    @property
    def seats(self) -> tuple[Seat, ...]:
        return (*self.learner, *self.workers)

    @property
    def learner_host(self) -> Host:
        """The host of rank 0, which all other processes connect to."""
        return self.learner[0].host

    @property
    def used_hosts(self) -> tuple[Host, ...]:
        """The hosts with at least a process, in order."""
        taken = {seat.host.name for seat in self.seats}
        return tuple(host for host in self.hosts if host.name in taken)


def crowded_words(config: Config, placement: Placement) -> list[str]:
    """Say for each host that more processes compute on CPUs than there are cores; none if they take turns.

    A worker of a running server computes nothing.
    """
    if config.rollout.takes_turns or (config.launcher.num_hosts > 1 and not config.launcher.cores_per_host):
        return []  # of hosts that are not known yet
    computing = placement.learner if config.rollout.server_urls else placement.seats
    num = Counter(seat.host.name for seat in computing if not seat.gpu_ids)
    return [
        f"{num[host.name]} processes compute on {counted(host.num_cores, 'core')} of {host.name} and wait for each "
        "other; lower rollout.num_workers or learner.num_ranks"
        for host in placement.used_hosts
        if num[host.name] > max(2, host.num_cores)
    ]


def counted(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def with_counts(config: Config, hosts: Sequence[Host]) -> Config:
    """Replace `auto` counts in the config by numbers.

    With GPUs, a quarter of them learn (a multiple of `learner.num_replicas`, at least 1) and the others generate,
    `rollout.tensor_parallel` GPUs per worker. If the GPUs are shared, or the workers use none, all GPUs learn. Without
    GPUs, a single rank learns and each host has a worker.

    Raises:
        ConfigError: the numbers do not fit the rest of the config.
    """
    num_ranks, num_workers = config.learner.num_ranks, config.rollout.num_workers
    if num_ranks and num_workers:
        return config
    num_gpus = sum(len(host.gpu_ids) for host in hosts)
    rank_gpus, worker_gpus = gpus_each(config, hosts)
    shared = shares_gpus(config, hosts)
    if not num_ranks:
        replicas = config.learner.num_replicas
        taken = 0 if shared else num_workers * worker_gpus
        keeps_all = bool(num_workers) or shared or not worker_gpus
        free = (num_gpus - taken) if keeps_all else num_gpus // _LEARNER_SHARE
        num_ranks = max(1, free // replicas) * replicas if rank_gpus else replicas
    if not num_workers:
        if config.rollout.server_urls:
            num_workers = len(config.rollout.server_urls)
        elif shared:
            num_workers = num_ranks
        elif worker_gpus:
            left = _left_by_learner(hosts, num_ranks * rank_gpus)
            num_workers = max(1, sum(gpus // worker_gpus for gpus in left))
        else:
            num_workers = len(hosts)
    if num_workers > MOST_WORKERS:
        raise ConfigError(
            f"rollout.num_workers: expected at most {MOST_WORKERS}, auto gives {num_workers} on these hosts; set a "
            "number, or raise rollout.tensor_parallel"
        )
    counted = msgspec.structs.replace(
        config,
        learner=msgspec.structs.replace(config.learner, num_ranks=num_ranks),
        rollout=msgspec.structs.replace(config.rollout, num_workers=num_workers),
    )
    validate(counted)
    return counted


def place(config: Config, hosts: Sequence[Host]) -> Placement:
    """Give a seat to each process of a config whose counts are numbers.

    The processes of a host share the memory evenly, and the cores too if the config says 0 threads. In turns, the
    learner's processes share all cores, and so do the workers.

    Raises:
        TooFewError: the hosts have too few GPUs; the message says how many are missing.
    """
    rank_gpus, worker_gpus = gpus_each(config, hosts)
    free = {host.name: host.gpu_ids for host in hosts}
    places: list[tuple[Host, tuple[str, ...]]] = []

    num_placed: Counter[str] = Counter()

    def num_on(host: Host) -> int:
        return num_placed[host.name]

    def take(num_gpus: int, order: Callable[[Host], float]) -> None:
        """Place a process on the first host in this order that has enough free GPUs."""
        able = [host for host in hosts if len(free[host.name]) >= num_gpus]
        if not able:
            raise _too_few(config, hosts, rank_gpus, worker_gpus)
        host = min(able, key=order)
        gpu_ids, free[host.name] = free[host.name][:num_gpus], free[host.name][num_gpus:]
        places.append((host, gpu_ids))
        num_placed[host.name] += 1

    for _ in range(config.learner.num_ranks):  # packed: on CPUs, fill the cores of a host before the next host
        take(rank_gpus, lambda host: 0 if rank_gpus else num_on(host) // max(1, host.num_cores))
    if shares_gpus(config, hosts):
        if config.rollout.num_workers > config.learner.num_ranks:
            raise _too_few(config, hosts, rank_gpus, worker_gpus)
        places += places[: config.rollout.num_workers]
        num_placed.update(host.name for host, _ in places[config.learner.num_ranks :])
    while len(places) < config.learner.num_ranks + config.rollout.num_workers:
        # Spread: most free GPUs first, or most cores per process.
        take(worker_gpus, lambda host: -len(free[host.name]) if worker_gpus else -host.num_cores / (1 + num_on(host)))

    def seats(taken: Sequence[tuple[Host, tuple[str, ...]]], num_threads: int) -> tuple[Seat, ...]:
        together = Counter(host.name for host, _ in taken) if config.rollout.takes_turns else num_placed
        return tuple(
            Seat(host, gpu_ids, num_threads or max(1, host.num_cores // together[host.name])) for host, gpu_ids in taken
        )

    ranks, workers = places[: config.learner.num_ranks], places[config.learner.num_ranks :]
    return Placement(tuple(hosts), seats(ranks, config.learner.num_threads), seats(workers, config.rollout.num_threads))


def resized(placement: Placement, num_workers: int) -> Placement:
    """Remove the last workers, or add workers like the first; all other seats stay.

    More workers on a CPU share the same cores.

    Raises:
        PreflightError: the hosts have too few free GPUs.
    """
    workers, like, hosts = placement.workers[:num_workers], placement.workers[0], placement.hosts
    num_gpus = len(like.gpu_ids)
    while len(workers) < num_workers:
        seats = (*placement.learner, *workers)
        num_on = {host.name: sum(seat.host.name == host.name for seat in seats) for host in hosts}
        taken = {(seat.host.name, gpu_id) for seat in seats for gpu_id in seat.gpu_ids}
        free = {host.name: [gpu for gpu in host.gpu_ids if (host.name, gpu) not in taken] for host in hosts}
        host = max(hosts, key=lambda h: (len(free[h.name]) if num_gpus else 0, h.num_cores / (1 + num_on[h.name])))
        if len(free[host.name]) < num_gpus:
            raise PreflightError(
                f"num_workers: {num_workers} workers need {num_gpus} free GPUs each, there is room for {len(workers)}; "
                "wait for other runs, or resume this run on more hosts: areal-rloo resume RUN_FOLDER"
            )
        workers = (*workers, dataclasses.replace(like, host=host, gpu_ids=tuple(free[host.name][:num_gpus])))
    return dataclasses.replace(placement, workers=workers)


def _left_by_learner(hosts: Sequence[Host], num_taken: int) -> list[int]:
    left = []
    for host in hosts:
        taken = min(num_taken, len(host.gpu_ids))
        num_taken -= taken
        left.append(len(host.gpu_ids) - taken)
    return left


def gpus_each(config: Config, hosts: Sequence[Host]) -> tuple[int, int]:
    """Count the GPUs of each learner rank and of each worker; a worker of an external server needs none."""
    there = any(host.gpu_ids for host in hosts)

    def wants(device: str) -> int:
        return int(there) if device == "auto" else int(device.startswith("cuda"))

    worker_gpus = 0 if config.rollout.server_urls else wants(config.rollout.device) * config.rollout.tensor_parallel
    return wants(config.learner.device), worker_gpus


def shares_gpus(config: Config, hosts: Sequence[Host]) -> bool:
    """Return True if each worker runs on the GPU of a learner rank; with `auto`, a pair on the only GPU."""
    single = sum(len(host.gpu_ids) for host in hosts) == 1
    pair = max(config.learner.num_ranks, config.rollout.num_workers) <= 1  # 0: auto
    wanted = config.rollout.shares or (config.rollout.share_devices == "auto" and single and pair)
    return wanted and gpus_each(config, hosts) == (1, 1)


def _too_few(config: Config, hosts: Sequence[Host], rank_gpus: int, worker_gpus: int) -> TooFewError:
    num_ranks, num_workers = config.learner.num_ranks, config.rollout.num_workers
    shared = shares_gpus(config, hosts)
    wanted = max(num_ranks, num_workers) if shared else num_ranks * rank_gpus + num_workers * worker_gpus
    there = sum(len(host.gpu_ids) for host in hosts)
    asked = (
        f"learner.device={config.learner.device}, learner.num_ranks={num_ranks}, "
        f"rollout.device={config.rollout.device}, rollout.num_workers={num_workers}, "
        f"rollout.tensor_parallel={config.rollout.tensor_parallel}"
    )
    have = f"the host has {there}" if len(hosts) == 1 else f"the {len(hosts)} hosts have {there}"
    if wanted > there:
        short = f"{have}, {wanted - there} too few"
    else:
        short = f"{have}, but not {worker_gpus} together for each worker (GPUs of a worker are all on one host)"
    return TooFewError(f"devices: the plan needs {counted(wanted, 'GPU')} ({asked}), {short}")
