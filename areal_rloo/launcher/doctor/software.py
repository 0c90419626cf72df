"""Checks of the software: Python, packages, and environment variables with known problems.

Nothing is imported: versions come from the metadata of pip, network interfaces from the kernel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import areal_rloo
from areal_rloo.errors import ConfigError, install
from areal_rloo.launcher.doctor.base import Finding, Situation, ok, unsure, wrong

_LEAST_PYTHON = (3, 11)
_DISTRIBUTION = "areal-rloo"
_EXTRAS = {"liger": "liger_kernel"}  # the module of an extra with another name
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?(?:>=([\d.]+))?")
_INTERFACES = Path("/sys/class/net")
# The effect of each value on a run.
_SLOW_OR_RISKY = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a host communicate through host memory instead of directly",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a host communicate through sockets",
    ("NCCL_IB_DISABLE", "1"): "InfiniBand and RoCE are not used",
    ("NCCL_DEBUG", "TRACE"): "every call of NCCL is logged, which fills disks",
    ("NCCL_BLOCKING_WAIT", "1"): "collectives block their threads, and a dead rank is noticed late",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "collectives block their threads, and a dead rank is noticed late",
    ("NCCL_ASYNC_ERROR_HANDLING", "0"): "a rank waits forever for a dead rank",
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"): "a rank waits forever for a dead rank",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "a second collective checks every collective",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the CPU waits for every kernel",
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def check_python(situation: Situation) -> Iterator[Finding]:
    """Check the version of Python, and the origin of packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _LEAST_PYTHON:
        least = ".".join(map(str, _LEAST_PYTHON))
        yield wrong("python", f"{sys.executable} is {version}, {least} or newer is needed", f"use Python {least}")
    else:
        home = Path(areal_rloo.__file__).parent
        yield ok("python", f"{version} at {sys.executable}, areal_rloo {areal_rloo.__version__} of {home}")
    for part in filter(None, situation.environment.get("PYTHONPATH", "").split(":")):
        if "site-packages" in part or (Path(part) / "torch").is_dir():
            what = f"packages of {part} come before those of {sys.prefix}"
            yield unsure("PYTHONPATH", what, "unset PYTHONPATH where they are of another Python")


def check_packages(situation: Situation) -> Iterator[Finding]:
    """Check all required packages and their versions."""
    pip = f"{sys.executable} -m pip install"
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield unsure("packages", f"{_DISTRIBUTION} is not installed in {sys.prefix}", f"{pip} -e . in its checkout")
        return
    found = []
    for requirement in requirements:
        read = _REQUIREMENT.fullmatch(requirement)
        if read is None:
            continue  # a requirement of an extra
        name, least = read.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield wrong("packages", f"{name} is not installed in {sys.prefix}", f"{pip} '{requirement}'")
            continue
        if least is not None and _numbers(version) < _numbers(least):
            yield wrong("packages", f"{name} is {version}, {least} or newer is needed", f"{pip} '{requirement}'")
        else:
            found.append(f"{name} {version}")
    yield ok("packages", ", ".join(found))


def check_extras(situation: Situation) -> Iterator[Finding]:
    """Check for the packages, and for the GPU, that options need."""
    config = situation.config
    needed = {"learner.lora": "peft"} if config.learner.lora is not None else {}
    if config.learner.kernels == "liger":
        if config.learner.device == "cpu" or not situation.host.gpu_ids:
            what = "expected torch on a CPU, got liger, whose kernels need a GPU"
            yield wrong("learner.kernels", what, "set learner.kernels=torch", ConfigError)
        needed["learner.kernels"] = "liger"
    for key, extra in [*needed.items(), *(("telemetry.trackers", name) for name in config.telemetry.trackers)]:
        module = _EXTRAS.get(extra, extra)
        if importlib.util.find_spec(module) is None:
            yield wrong(key, f"{module} is not installed", install(extra), absent=True)


def check_variables(situation: Situation) -> Iterator[Finding]:
    """Find variables with missing devices, slow settings, or misdirected connections."""
    environment = situation.environment
    found = [*_interfaces(environment), *_adapters(environment), *_libraries(environment), *_proxies(environment)]
    for (name, value), what in _SLOW_OR_RISKY.items():
        if environment.get(name, "").upper() == value:
            found.append(unsure(name, f"{value}: {what}", f"unset {name} where nothing needs it"))
    yield from found
    if not found:
        known = [name for name in sorted(environment) if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))]
        yield ok("variables", f"no problem found; set are {', '.join(known) or 'none of NCCL_*, GLOO_*'}")


def _interfaces(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the interfaces that variables give to collectives."""
    present = {name for _, name in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environment.get(variable)
        if not value:
            continue
        named = _chosen_by_nccl(value, present) if variable.startswith("NCCL") else set(value.split(","))
        absent, chosen = named - present, named & present
        up = [name for name in chosen if not _is_down(name)]
        fix = f"unset {variable}, or name one that `ip address` shows"
        if absent or not chosen:
            yield wrong(variable, f"{value}: no such interface; there are {', '.join(sorted(present))}", fix)
        elif not up:
            yield wrong(variable, f"{value}: {', '.join(sorted(chosen))} is down", fix)
        elif up == ["lo"]:
            yield unsure(variable, f"{value}: no other host can be reached through lo", fix)


def _chosen_by_nccl(value: str, present: set[str]) -> set[str]:
    """Select interfaces as NCCL does: by prefix; `=` asks for whole names, `^` for all others."""
    text = value.removeprefix("^")
    names = [name.partition(":")[0] for name in text.removeprefix("=").split(",") if name]
    exact = text.startswith("=")
    matched = {real for real in present if any(real == name if exact else real.startswith(name) for name in names)}
    return present - matched if value.startswith("^") else matched


def _is_down(interface: str) -> bool:
    try:
        return (_INTERFACES / interface / "operstate").read_text(encoding="ascii").strip() == "down"
    except OSError:
        return False  # not Linux


def _adapters(environment: Mapping[str, str]) -> Iterator[Finding]:
    value, folder = environment.get("NCCL_IB_HCA"), Path("/sys/class/infiniband")
    if value and not value.startswith("^"):
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
        absent = [name for name in names if not any(real.startswith(name) for real in present)]
        if absent:
            there = ", ".join(sorted(present)) or "none"
            what = f"{value}: no such adapter here: {', '.join(absent)}; there are {there}"
            yield wrong("NCCL_IB_HCA", what, "unset NCCL_IB_HCA, or name those that `ibv_devices` shows")


def _libraries(environment: Mapping[str, str]) -> Iterator[Finding]:
    for part in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        own = next((f for pattern in ("libnccl.so*", "libcudnn.so*") for f in Path(part).glob(pattern)), None)
        if own is not None:
            what = f"torch would load {own} instead of its own copy"
            yield unsure("LD_LIBRARY_PATH", what, f"leave {part} out of LD_LIBRARY_PATH")


def _proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    exempt = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    proxy = next((name for name in _PROXIES if environment.get(name)), None)
    if proxy is not None and "*" not in exempt and not {"127.0.0.1", "localhost"} & set(exempt.split(",")):
        what = "calls of this machine to itself may go through a proxy: agents and reward services are such calls"
        yield unsure(proxy, what, "export no_proxy=127.0.0.1,localhost and the hosts of the run")


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading.group().split("."))) if leading else ()
