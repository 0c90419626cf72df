"""From a config and a placement to the processes of a run: a pure function, printed by `--dry-run`.

Every launcher runs the same plan; they differ in where hosts come from and in what starts a process on one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_rloo.config import ENTRY, Config
from areal_rloo.launcher.placement import Host, Placement, Seat


@dataclass(frozen=True, slots=True)
class Addresses:
    """Ports on the learner's host, and the folder of its shared memory. A port is 0 where nobody listens."""

    wire_port: int
    meeting_port: int  # of the learner's ranks
    segment_folder: Path


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start.

    Attributes:
        name: of the process, of its log, and of what a scheduler calls it.
        role: what it does, in words.
        host: name of where it runs.
        device: cuda or cpu.
        gpu_ids: of the host, that it sees.
        num_threads: of the CPU.
        memory_bytes: its share of the host; 0 where nobody knows.
        environment: variables that it has beside its launcher's.
        command: to be run in the folder of the launcher.
        max_restarts: by itself; a rank of the learner begins anew with all the others.
    """

    name: str
    role: str
    host: str
    device: str
    gpu_ids: tuple[str, ...]
    num_threads: int
    memory_bytes: int
    environment: dict[str, str]
    command: tuple[str, ...]
    max_restarts: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a run.

    Attributes:
        preparation: runs to its end before the others start; None where nothing is to be prepared.
        learner: its ranks.
        workers: rollout workers.
        max_learner_restarts: of all ranks together, from the newest checkpoint, while the workers go on.
    """

    preparation: ProcessSpec | None
    learner: tuple[ProcessSpec, ...]
    workers: tuple[ProcessSpec, ...]
    max_learner_restarts: int

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All, in the order they start in."""
        first = () if self.preparation is None else (self.preparation,)
        return (*first, *self.learner, *self.workers)


def plan_run(
    config: Config,
    placement: Placement,
    *,
    run_folder: Path,
    model_path: str,
    addresses: Addresses,
    resume: bool,
    warm_start_s: float,
) -> Plan:
    """The plan of a run.

    Args:
        config: with numbers for counts, and a wire.host that all hosts of the placement reach.
        placement: a seat for each process.
        run_folder: on a file system that all hosts share.
        model_path: a folder or a hub name; read by every process.
        addresses: where the learner listens.
        resume: whether the learner goes on from its newest checkpoint.
        warm_start_s: what the preparation took, for the summary.
    """
    common = (f"--run-folder={run_folder}", f"--model-path={model_path}")
    same_host = len(placement.used_hosts) == 1
    meeting_host = "127.0.0.1" if same_host else placement.learner_host.address
    of_learner = (
        *common,
        f"--meeting={meeting_host}:{addresses.meeting_port}",
        f"--port={addresses.wire_port}",
        f"--metrics-port={config.telemetry.metrics_port}",
        f"--segment-folder={addresses.segment_folder}",
        f"--warm-start-s={warm_start_s}",
        *(("--same-host",) if same_host else ()),
        *(("--resume",) if resume else ()),
    )
    return Plan(
        preparation=_preparation(config, placement, run_folder),
        learner=tuple(_learner_rank(config, rank, seat, of_learner) for rank, seat in enumerate(placement.learner)),
        workers=tuple(
            _rollout_worker(config, index, seat, addresses, common) for index, seat in enumerate(placement.workers)
        ),
        max_learner_restarts=config.launcher.max_learner_restarts,
    )


def _preparation(config: Config, placement: Placement, run_folder: Path) -> ProcessSpec | None:
    """What makes the tiny model, where the run uses it; it has all cores of the learner's host."""
    if config.model.path != "tiny":
        return None
    host = placement.learner_host
    # The cache is of one host, and a container's own goes with it.
    own_cache = len(placement.used_hosts) == 1 and config.launcher.container.runtime == "none"
    return _spec(
        config,
        Seat(host, (), host.num_cores, host.memory_bytes),
        name="warm_start",
        role="warm start",
        module="areal_rloo.learner.warm_start",
        arguments=(
            f"--run-folder={run_folder}",
            f"--num-threads={host.num_cores}",
            *(() if own_cache else (f"--models={run_folder / 'models'}",)),
        ),
    )


def _learner_rank(config: Config, rank: int, seat: Seat, arguments: tuple[str, ...]) -> ProcessSpec:
    return _spec(
        config,
        seat,
        name=f"learner-{rank}" if rank else "learner",
        role="learner rank" if rank else "learner",
        module="areal_rloo.learner",
        arguments=(f"--rank={rank}", *_place_arguments(seat), *arguments),
    )


def _rollout_worker(
    config: Config, index: int, seat: Seat, addresses: Addresses, arguments: tuple[str, ...]
) -> ProcessSpec:
    first_port = config.telemetry.metrics_port
    return _spec(
        config,
        seat,
        name=f"rollout-{index}",
        role=_worker_role(config, index),
        module="areal_rloo.rollout",
        arguments=(
            *arguments,
            *_place_arguments(seat),
            f"--worker-id=rollout-{index}",
            f"--address=tcp://{config.wire.host}:{addresses.wire_port}",
            f"--metrics-port={first_port + 1 + index if first_port else 0}",
            *(f"--server-url={url}" for url in config.rollout.server_urls[index : index + 1]),
        ),
        max_restarts=config.launcher.max_restarts,
    )


def _spec(
    config: Config,
    seat: Seat,
    *,
    name: str,
    role: str,
    module: str,
    arguments: tuple[str, ...],
    max_restarts: int = 0,
) -> ProcessSpec:
    threads = str(seat.num_threads)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(seat.gpu_ids),
    }
    if config.run.entry is not None:
        environment[ENTRY] = config.run.entry
    return ProcessSpec(
        name=name,
        role=role,
        host=seat.host.name,
        device="cuda" if seat.gpu_ids else "cpu",
        gpu_ids=seat.gpu_ids,
        num_threads=seat.num_threads,
        memory_bytes=seat.memory_bytes,
        environment=environment,
        command=(sys.executable, "-m", module, *arguments),
        max_restarts=max_restarts,
    )


def _worker_role(config: Config, index: int) -> str:
    if config.rollout.engine == "embedded":
        return "rollout worker"
    urls = config.rollout.server_urls
    return f"rollout worker of {urls[index]}" if urls else "rollout worker and its SGLang server"


def _place_arguments(seat: Seat) -> tuple[str, str]:
    return (f"--device={'cuda' if seat.gpu_ids else 'cpu'}", f"--num-threads={seat.num_threads}")


def on_network(config: Config, placement: Placement) -> Config:
    """The config with a wire.host that every host of the placement reaches; then CURVE is on."""
    learner_host: Host = placement.learner_host
    if len(placement.used_hosts) == 1 or config.wire.host not in ("127.0.0.1", "localhost", "0.0.0.0", "::"):
        return config
    return msgspec.structs.replace(config, wire=msgspec.structs.replace(config.wire, host=learner_host.address))
