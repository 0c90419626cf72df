"""From a config and a machine to the processes of a run: a pure function, printed by `--dry-run`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import msgspec

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Machine:
    """What a host offers."""

    num_cores: int
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a run listens. `metrics_ports` are the learner's and then one for each rollout worker."""

    wire_port: int
    meeting_port: int  # of the learner's ranks
    metrics_ports: tuple[int, ...]
    segment_folder: Path


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start."""

    name: str
    role: str
    device: str
    num_threads: int
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 0


class _Placement(TypedDict):
    device: str
    num_threads: int
    environment: dict[str, str]


def plan_preparation(config: Config, machine: Machine, run_folder: Path) -> ProcessSpec | None:
    """The process that makes the tiny model before the others start, where the run uses it; it has all cores."""
    if config.model.path != "tiny":
        return None
    command = (
        *_module("areal_rloo.learner.warm_start"),
        f"--run-folder={run_folder}",
        f"--num-threads={machine.num_cores}",
    )
    return ProcessSpec(
        name="warm_start",
        role="warm start",
        device="cpu",
        num_threads=machine.num_cores,
        command=command,
        environment=_environment(machine.num_cores, ()),
    )


def plan_run(
    config: Config,
    machine: Machine,
    *,
    run_folder: Path,
    model_path: str,
    addresses: Addresses,
    resume: bool,
    warm_start_s: float,
) -> list[ProcessSpec]:
    """The learner first, then its other ranks, then the rollout workers.

    GPUs go one to each rank of the learner and `rollout.tensor_parallel` to each worker, in order, and to none whose
    SGLang server runs already; cores are shared evenly where the config says 0.

    Raises:
        PreflightError: a device was asked for that the machine does not have; says by how much.
    """
    common = (f"--run-folder={run_folder}", f"--model-path={model_path}")
    of_learner = (
        *common,
        f"--meeting=127.0.0.1:{addresses.meeting_port}",
        f"--port={addresses.wire_port}",
        f"--metrics-port={addresses.metrics_ports[0]}",
        f"--segment-folder={addresses.segment_folder}",
        f"--warm-start-s={warm_start_s}",
        "--same-host",
        *(("--resume",) if resume else ()),
    )
    return [*_learner_ranks(config, machine, of_learner), *_rollout_workers(config, machine, addresses, common)]


def _learner_ranks(config: Config, machine: Machine, arguments: tuple[str, ...]) -> list[ProcessSpec]:
    num_gpus, _ = _gpus_wanted(config, machine)
    threads = config.learner.num_threads or _share_of_cores(config, machine)
    return [
        ProcessSpec(
            name=f"learner-{rank}" if rank else "learner",
            role="learner rank" if rank else "learner",
            **_placement(threads, machine.gpu_ids[rank * num_gpus :][:num_gpus]),
            command=(
                *_module("areal_rloo.learner"),
                f"--rank={rank}",
                *_place_arguments(threads, num_gpus),
                *arguments,
            ),
        )
        for rank in range(config.learner.num_ranks)
    ]


def _rollout_workers(
    config: Config, machine: Machine, addresses: Addresses, arguments: tuple[str, ...]
) -> list[ProcessSpec]:
    rank_gpus, num_gpus = _gpus_wanted(config, machine)
    gpu_ids = machine.gpu_ids[config.learner.num_ranks * rank_gpus :]
    threads = config.rollout.num_threads or _share_of_cores(config, machine)
    return [
        ProcessSpec(
            name=f"rollout-{index}",
            role=_worker_role(config, index),
            **_placement(threads, gpu_ids[index * num_gpus :][:num_gpus]),
            command=(
                *_module("areal_rloo.rollout"),
                *arguments,
                *_place_arguments(threads, num_gpus),
                f"--worker-id=rollout-{index}",
                f"--address=tcp://{config.wire.host}:{addresses.wire_port}",
                f"--metrics-port={addresses.metrics_ports[1 + index]}",
                *(f"--server-url={url}" for url in config.rollout.server_urls[index : index + 1]),
            ),
            max_restarts=config.launcher.max_restarts,
        )
        for index in range(config.rollout.num_workers)
    ]


def _share_of_cores(config: Config, machine: Machine) -> int:
    return max(1, machine.num_cores // (config.learner.num_ranks + config.rollout.num_workers))


def _gpus_wanted(config: Config, machine: Machine) -> tuple[int, int]:
    """GPUs of each learner rank and of each worker; refuses more than there are."""
    num_ranks, num_workers = config.learner.num_ranks, config.rollout.num_workers
    rank_gpus, worker_gpus = _wants_gpu(config.learner.device, machine), _wants_gpu(config.rollout.device, machine)
    worker_gpus *= 0 if config.rollout.server_urls else config.rollout.tensor_parallel
    wanted = num_ranks * rank_gpus + num_workers * worker_gpus
    if wanted > len(machine.gpu_ids):
        raise PreflightError(
            f"devices: the plan needs {wanted} GPUs (learner.device={config.learner.device}, "
            f"learner.num_ranks={num_ranks}, rollout.device={config.rollout.device}, "
            f"rollout.num_workers={num_workers}, "
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}), this machine has {len(machine.gpu_ids)}; "
            "lower learner.num_ranks, rollout.num_workers or rollout.tensor_parallel, or set a device to cpu"
        )
    return rank_gpus, worker_gpus


def _worker_role(config: Config, index: int) -> str:
    if config.rollout.engine == "embedded":
        return "rollout worker"
    urls = config.rollout.server_urls
    return f"rollout worker of {urls[index]}" if urls else "rollout worker and its SGLang server"


def _place_arguments(num_threads: int, num_gpus: int) -> tuple[str, str]:
    return (f"--device={'cuda' if num_gpus else 'cpu'}", f"--num-threads={num_threads}")


def _placement(num_threads: int, gpu_ids: tuple[str, ...]) -> _Placement:
    return {
        "device": "cuda" if gpu_ids else "cpu",
        "num_threads": num_threads,
        "environment": _environment(num_threads, gpu_ids),
    }


def describe(specs: list[ProcessSpec]) -> str:
    """The plan as a table."""
    rows = [("PROCESS", "ROLE", "DEVICE", "THREADS", "RESTARTS", "COMMAND")]
    for spec in specs:
        device = spec.environment.get("CUDA_VISIBLE_DEVICES", "")
        shown = f"cuda:{device}" if spec.device == "cuda" else spec.device
        command = " ".join(("python", *spec.command[1:]))
        rows.append((spec.name, spec.role, shown, str(spec.num_threads), str(spec.max_restarts), command))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows]
    return "\n".join(lines)


def _wants_gpu(device: str, machine: Machine) -> int:
    if device == "auto":
        return int(bool(machine.gpu_ids))
    return int(device.startswith("cuda"))


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _environment(num_threads: int, gpu_ids: tuple[str, ...]) -> dict[str, str]:
    threads = str(num_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids),
    }
