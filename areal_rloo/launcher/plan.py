"""The plan of a run: the command, environment and GPUs of each process, from a config and a placement.

`plan_run` is a pure function, so `--dry-run` prints (`as_table`, `as_json`) the same plan as a start.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_rloo.config import ENTRY, Config, is_loopback, validate
from areal_rloo.launcher.placement import Placement, Seat, counted
from areal_rloo.ports import host_and_port
from areal_rloo.wire.address import SocketFile, tcp_text

_TITLES = ("PROCESS", "ROLE", "HOST", "DEVICE", "CPUS", "RESTARTS", "COMMAND")
_SERVERS = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A run, ready to start: the config has numbers for counts, and all hosts see the run folder."""

    config: Config
    placement: Placement
    folder: Path
    wire: str  # the learner's address on the wire (wire/address.py)
    meeting_port: int  # of the learner's ranks; 0: not used
    resume: bool

    @property
    def models(self) -> Path | None:
        """The folder for the tiny model; None for the cache of the learner's host."""
        # Other hosts cannot read the cache of this host, and the cache inside a container is lost with the container.
        own_cache = len(self.placement.used_hosts) == 1 and self.config.launcher.container.runtime == "none"
        return None if own_cache else self.folder / "models"


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start.

    Attributes:
        name: of the process, the log, and the step or actor in a cluster.
        environment: variables on top of the launcher's.
        withheld: variables of the launcher that the process does not get.
        command: run in the launcher's working folder.
        max_restarts: of this process alone; `Plan.max_learner_restarts` has those of the others.
    """

    name: str
    role: str
    host: str
    device: str
    gpu_ids: tuple[str, ...]
    num_threads: int
    environment: dict[str, str]
    withheld: tuple[str, ...] = ()
    command: tuple[str, ...]
    max_restarts: int = 0

    def environment_from(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Make the environment of the process from that of the launcher."""
        return {name: value for name, value in variables.items() if name not in self.withheld} | self.environment


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a run. `preparation` ends before all others start.

    `max_learner_restarts`: of all ranks together, from the newest checkpoint, while the workers go on; before that, of
    the preparation.
    """

    preparation: ProcessSpec | None
    learner: tuple[ProcessSpec, ...]
    workers: tuple[ProcessSpec, ...]
    max_learner_restarts: int

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All processes in the order of their start."""
        first = () if self.preparation is None else (self.preparation,)
        return (*first, *self.learner, *self.workers)


def plan_run(request: JobRequest, *, model_path: str, warm_start_s: float = 0.0) -> Plan:
    """Plan a run whose wire.host is an address for all hosts of the placement.

    Args:
        model_path: a folder or a hub name; read by every process.
        warm_start_s: duration of the preparation, for the summary.
    """
    config, placement = request.config, request.placement
    common = (f"--run-folder={request.folder}", f"--model-path={model_path}", f"--wire={request.wire}")
    same_host = len(placement.used_hosts) == 1
    ranks_on_one_host = len({seat.host.name for seat in placement.learner}) == 1
    meeting_host = "127.0.0.1" if ranks_on_one_host else config.wire.host
    of_learner = (
        *common,
        f"--meeting={host_and_port(meeting_host, request.meeting_port)}",
        f"--metrics-port={config.telemetry.metrics_port}",
        f"--warm-start-s={warm_start_s}",
        *(("--same-host",) if same_host else ()),
        *(("--resume",) if request.resume else ()),
    )
    return Plan(
        preparation=_preparation(request) if config.model.path == "tiny" else None,
        learner=tuple(
            _spec(
                config,
                seat,
                name=f"learner-{rank}" if rank else "learner",
                role="learner rank" if rank else "learner",
                module="areal_rloo.learner",
                arguments=(f"--rank={rank}", *_place_arguments(seat), *of_learner),
            )
            for rank, seat in enumerate(placement.learner)
        ),
        workers=tuple(_rollout_worker(config, index, seat, common) for index, seat in enumerate(placement.workers)),
        max_learner_restarts=config.launcher.max_learner_restarts,
    )


def _preparation(request: JobRequest) -> ProcessSpec:
    """Plan the warm start of the tiny model, on all cores of the learner's host."""
    config, host = request.config, request.placement.learner_host
    return _spec(
        config,
        Seat(host, (), host.num_cores),
        name="warm_start",
        role="warm start",
        module="areal_rloo.learner.warm_start",
        arguments=(
            f"--run-folder={request.folder}",
            f"--num-threads={host.num_cores}",
            *(() if request.models is None else (f"--models={request.models}",)),
        ),
    )


def _rollout_worker(config: Config, index: int, seat: Seat, arguments: tuple[str, ...]) -> ProcessSpec:
    first_port, urls = config.telemetry.metrics_port, config.rollout.server_urls
    role = "rollout worker"
    if config.rollout.engine != "embedded":
        role += f" of {urls[index]}" if urls else f" and its {_SERVERS[config.rollout.engine]} server"
    return _spec(
        config,
        seat,
        name=f"rollout-{index}",
        role=role,
        module="areal_rloo.rollout",
        arguments=(
            *arguments,
            *_place_arguments(seat),
            f"--worker-id=rollout-{index}",
            f"--metrics-port={first_port + 1 + index if first_port else 0}",
            *(f"--server-url={url}" for url in urls[index : index + 1]),
        ),
        max_restarts=config.launcher.max_restarts,
    )


def _spec(
    config: Config, seat: Seat, *, name: str, role: str, module: str, arguments: tuple[str, ...], max_restarts: int = 0
) -> ProcessSpec:
    threads, server = str(seat.num_threads), config.rollout.server
    key = None if server is None else server.api_key_env
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
        device=_device(seat),
        gpu_ids=seat.gpu_ids,
        num_threads=seat.num_threads,
        environment=environment,
        withheld=() if module == "areal_rloo.rollout" or key is None else (key,),
        command=(sys.executable, "-m", module, *arguments),
        max_restarts=max_restarts,
    )


def _device(seat: Seat) -> str:
    return "cuda" if seat.gpu_ids else "cpu"


def _place_arguments(seat: Seat) -> tuple[str, str]:
    return f"--device={_device(seat)}", f"--num-threads={seat.num_threads}"


def on_network(config: Config, placement: Placement) -> Config:
    """Set an address of the learner for all hosts as wire.host.

    Raises:
        ConfigError: the address does not fit the rest of the config.
    """
    if len(placement.used_hosts) == 1 or not (is_loopback(config.wire.host) or config.wire.host in ("0.0.0.0", "::")):
        return config
    config = msgspec.structs.replace(
        config, wire=msgspec.structs.replace(config.wire, host=placement.learner_host.address)
    )
    validate(config)
    return config


def wire_address(config: Config, port: int, private_folder: Path | None) -> str:
    """Choose the learner's address: a socket file in a private folder, if all processes see the folder, else TCP.

    Raises:
        PreflightError: the path of the folder is too long for a socket file.
    """
    if private_folder is None or config.wire_asks_for_tcp:
        return tcp_text(config.wire.host, config.wire.port or port)
    return SocketFile.inside(private_folder).endpoint


def as_table(plan: Plan, placement: Placement) -> str:
    """Format a plan for people: a line for each process, then a line for each host."""
    rows = [_TITLES, *(_row(spec, plan) for spec in plan.processes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES) - 1)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    specs = (*plan.learner, *plan.workers)
    num_processes = Counter(spec.host for spec in specs)
    num_gpus = Counter(host for host, _ in {(spec.host, gpu_id) for spec in specs for gpu_id in spec.gpu_ids})
    hosts = [
        f"{host.name} ({host.address}): {num_processes[host.name]} process{'es' * (num_processes[host.name] != 1)}, "
        f"{num_gpus[host.name]} of {len(host.gpu_ids)} GPUs, {counted(host.num_cores, 'core')}"
        for host in placement.hosts
    ]
    return "\n".join([*lines, "", *hosts])


def _row(spec: ProcessSpec, plan: Plan) -> tuple[str, ...]:
    return (
        spec.name,
        spec.role,
        spec.host,
        f"cuda:{','.join(spec.gpu_ids)}" if spec.gpu_ids else spec.device,
        str(spec.num_threads),
        str(spec.max_restarts if spec in plan.workers else plan.max_learner_restarts),
        " ".join(("python", *spec.command[1:])),
    )


def as_json(plan: Plan, placement: Placement) -> str:
    """Format a plan for programs: `{"hosts": [...], "processes": [...], "max_learner_restarts": n}` in a line."""
    shown = {"hosts": placement.hosts, "processes": plan.processes, "max_learner_restarts": plan.max_learner_restarts}
    return msgspec.json.encode(shown).decode()
