"""What is checked before anything starts, in well under a second: each failure is one line with its remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from areal_rloo.config import Config, SGLangConfig, import_function, is_loopback
from areal_rloo.errors import ModelError, PreflightError
from areal_rloo.launcher.plan import Machine
from areal_rloo.tasks import check_data
from areal_rloo.tasks.tools.sandbox import check_sandbox

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def this_machine() -> Machine:
    """Cores this process may use, and GPUs as the driver lists them; no torch needed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = tuple(part for part in visible.split(",") if part)
    elif shutil.which("nvidia-smi") is None:
        gpus = ()
    else:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        gpus = tuple(listed.stdout.split()) if listed.returncode == 0 else ()
    return Machine(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, gpus)


def check(config: Config) -> None:
    """Everything that can be known before the plan.

    Raises:
        UserError: the first thing that is wrong.
    """
    if config.rollout.engine == "sglang":
        _check_sglang(config.rollout.sglang)
    _check_model("model.path", config.model.path)
    if config.model.reference is not None and config.model.reference.path != "initial":
        _check_model("model.reference.path", config.model.reference.path)
    if config.algorithm.group_filter is not None:
        import_function("algorithm.group_filter", config.algorithm.group_filter)
    episode = config.rollout.episode
    if episode.agent is not None:
        import_function("rollout.episode.agent", episode.agent)
    elif not episode.built_in:
        import_function("rollout.episode.type", episode.type)
    check_data(config.data)
    for key, port in (("wire.port", config.wire.port), ("telemetry.metrics_port", config.telemetry.metrics_port)):
        if port:
            _check_port(key, config.wire.host if key == "wire.port" else "127.0.0.1", port)


def check_tools(config: Config, folder: Path) -> None:
    """What the policy may run can be locked in here, and away from the run folder.

    Raises:
        PreflightError: it cannot; says what is missing.
    """
    episode = config.rollout.episode
    if episode.type == "tool_use" and "python" in episode.tools:
        check_sandbox([folder])


def check_disk(config: Config, folder: Path) -> None:
    """The run folder can be written and has room.

    Raises:
        PreflightError: it cannot or has not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise PreflightError(f"run.folder: {folder} cannot be written: {error}; choose another") from error
    free, least = shutil.disk_usage(folder).free, config.launcher.min_free_disk_bytes
    if free < least:
        raise PreflightError(
            f"run.folder: {folder} has {free} bytes free, expected launcher.min_free_disk_bytes={least} or more"
        )


def free_ports(num: int) -> list[int]:
    """Ports of loopback that are free at this moment, all different."""
    sockets = [socket.socket() for _ in range(num)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _check_sglang(sglang: SGLangConfig) -> None:
    from areal_rloo.engines.sglang import find_api_key, find_python  # noqa: PLC0415 - its neighbours import torch

    if sglang.urls:
        find_api_key(sglang)
    else:
        find_python(sglang)


def _check_model(key: str, path: str) -> None:
    if path == "tiny":
        return
    folder = Path(path)
    if not folder.exists():
        if _HUB_NAME.fullmatch(path) and not path.startswith("."):
            return  # a hub name; whether the hub can be reached, the learner finds out
        raise ModelError(f"{key}: {path}: no such folder; expected a model folder, a hub name (org/name), or tiny")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if (folder / "model" / "config.json").is_file():
            raise ModelError(f"{key}: {path}: this is a checkpoint; its model is {folder / 'model'}") from error
        raise ModelError(f"{key}: {path}: config.json cannot be read: {error}") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{key}: {path}: no .safetensors file in it; expected a Hugging Face model folder")


def _check_port(key: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host if is_loopback(host) else "", port))
        except OSError as error:
            raise PreflightError(f"{key}: port {port} is in use ({error.strerror}); choose another, or 0") from error
