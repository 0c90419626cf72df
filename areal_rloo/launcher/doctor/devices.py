"""Checks of GPUs: the driver's list, CUDA_VISIBLE_DEVICES, and, with a thorough check, computations in torch."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import Config
from areal_rloo.decoding import from_json
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.doctor.base import (
    Finding,
    Situation,
    last_line,
    ok,
    refused,
    size,
    unsure,
    wrong,
    wrong_or_unsure,
)
from areal_rloo.launcher.hosts import DriverError, Gpu, list_gpus, real_host
from areal_rloo.launcher.nccl import pair_of, refusal

_PROBE_S = 180.0
_PROBE = "areal_rloo.launcher.doctor.probe_torch"
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_ON_CPU = "set learner.device=cpu and rollout.device=cpu"
_INSTALL = (
    f"install torch for the driver's CUDA into {sys.prefix} (https://pytorch.org/get-started/locally), or {_ON_CPU}"
)


class Device(msgspec.Struct, frozen=True):
    """A GPU as torch sees it. `trouble`: the error of a small computation; empty if the result was right."""

    name: str
    architecture: str
    trouble: str


class TorchSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `probe_torch.py devices`."""

    version: str
    cuda: str | None  # the version; None in a build without
    nccl: str | None
    architectures: tuple[str, ...] = ()  # of the build
    devices: tuple[Device, ...] = ()
    trouble: str = ""  # why there are no devices, in torch's words
    without_peers: tuple[tuple[int, int], ...] = ()  # pairs of GPUs without a direct link


def check_gpus(situation: Situation) -> Iterator[Finding]:
    """Check the driver, the number of visible GPUs, and their use by other processes."""
    visible = situation.environment.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = list_gpus()
    except DriverError as error:
        yield wrong("gpus", str(error), "see `dmesg`; reload the NVIDIA driver, or reboot")
        return
    if listed is None and _DEVICE_FILES[0].exists():
        yield unsure(
            "gpus",
            "there are GPUs, but no libnvidia-ml.so.1 with a loaded driver",
            "install the NVIDIA driver's library",
        )
        return
    try:
        real_host(situation.config.launcher)
    except PreflightError as error:  # too few
        yield refused(str(error).partition(":")[0], error, fix="lower it")
    if not listed:
        yield from _without_gpus(situation.config, visible)
        return
    shown, absent = _visible(listed, visible)
    if absent:
        what = f"{visible}: no GPU {', '.join(absent)} here; CUDA ignores this GPU and all after it in the list"
        indices = ",".join(gpu.index for gpu in listed)
        yield wrong("CUDA_VISIBLE_DEVICES", what, f"unset it, or choose among {indices}")
    elif not shown:
        what = f"empty: {len(listed)} GPUs are hidden"
        wanted = _asks_for_gpu(situation.config)
        yield wrong_or_unsure("CUDA_VISIBLE_DEVICES", what, "unset CUDA_VISIBLE_DEVICES", is_wrong=wanted)
    else:
        names = ", ".join(sorted({gpu.name for gpu in shown}))
        yield ok("gpus", f"{len(shown)} of {len(listed)} ({names}), driver {listed[0].driver}")
    yield from _busy(shown)
    if shown and _built_without_cuda():
        what = f"built without CUDA, and {len(shown)} GPUs are here"
        config = situation.config
        may_use = _asks_for_gpu(config) or "auto" in (config.learner.device, config.rollout.device)
        yield wrong_or_unsure("torch", what, _INSTALL, is_wrong=may_use)


def check_nccl(situation: Situation) -> Iterator[Finding]:
    """Compare NCCL here with NCCL of the server, if the weights go from GPU to GPU."""
    launcher, transport = situation.config.launcher, situation.config.weights.transport
    same_host = launcher.num_hosts == 1
    pair = pair_of(situation.config, [situation.host], same_host=same_host)
    if pair is None:
        return
    if not pair.differs:
        known = pair.here is not None and pair.there is not None
        yield ok("nccl", pair.words) if known else unsure("nccl", pair.words, pair.fix)
    elif same_host and transport == "auto":
        yield unsure("weights.transport", f"{pair.words}, so weights go through files", pair.fix)
    else:
        what, _, fix = refusal(pair, same_host=same_host).partition("; ")
        yield wrong("weights.transport", what, fix)


def _visible(listed: Sequence[Gpu], variable: str | None) -> tuple[list[Gpu], list[str]]:
    """Give the GPUs visible to CUDA, and the names in the variable without a GPU."""
    if variable is None:
        return list(listed), []
    shown, absent = [], []
    for name in (part.strip() for part in variable.split(",") if part.strip()):
        if name.startswith("MIG-"):
            continue  # a part of a GPU; the list has whole GPUs only
        found = next((gpu for gpu in listed if name == gpu.index or gpu.uuid.startswith(name)), None)
        if found is None:
            absent.append(name)
        else:
            shown.append(found)
    return shown, absent


def _without_gpus(config: Config, visible: str | None) -> Iterator[Finding]:
    named = [part for part in (visible or "").split(",") if part.strip()]
    if named and not any(file.exists() for file in _DEVICE_FILES):
        yield wrong("CUDA_VISIBLE_DEVICES", f"{visible}: there is no driver of GPUs here", f"unset it, or {_ON_CPU}")
    elif _asks_for_gpu(config):
        devices = f"learner.device={config.learner.device}, rollout.device={config.rollout.device}"
        yield wrong("gpus", f"{devices}, and there is none here", _ON_CPU)
    else:
        yield ok("gpus", "none")


def _busy(shown: Sequence[Gpu]) -> Iterator[Finding]:
    for gpu in shown:
        share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else 0.0
        if share > 0.5 or gpu.used_bytes > 2**30:
            what = f"{size(gpu.used_bytes)} of {size(gpu.total_bytes)} are in use"
            fix = "end the processes that `nvidia-smi` shows, or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield wrong_or_unsure(f"gpu {gpu.index}", what, fix, is_wrong=share > 0.5)


def _asks_for_gpu(config: Config) -> bool:
    rollout = config.rollout.device.startswith("cuda") and not config.rollout.server_urls
    return rollout or config.learner.device.startswith("cuda")


def _built_without_cuda() -> bool:
    """Read the build of torch from a file; an import would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*= *None", text, re.MULTILINE) is not None


def check_torch(situation: Situation) -> Iterator[Finding]:
    """Import torch in a process, count the GPUs, and compute on each of them."""
    works, said = _run_probe(situation, "devices")
    if not works:
        fix = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11'"
        yield wrong("torch", f"cannot be imported or asked: {said}", fix)
        return
    seen = from_json(said.encode(), TorchSeen)
    cuda = f"CUDA {seen.cuda}" if seen.cuda else "no CUDA"
    yield ok("torch", f"{seen.version}, {cuda}, NCCL {seen.nccl or 'none'}, {len(seen.devices)} GPUs")
    if seen.cuda is not None:
        try:
            shown, _ = _visible(list_gpus() or (), situation.environment.get("CUDA_VISIBLE_DEVICES"))
        except DriverError:
            shown = []  # `check_gpus` reports the error
        if len(seen.devices) < len(shown):
            what = f"sees {len(seen.devices)} of {len(shown)} GPUs. {seen.trouble}".rstrip()
            yield wrong("torch", what, f"update the NVIDIA driver (it is {shown[0].driver}), or {_INSTALL}")
    for num, device in enumerate(seen.devices):
        if device.trouble:
            what = f"{device.name}: {device.trouble}"
            yield wrong(f"cuda:{num}", what, "see `dmesg` and `nvidia-smi -q`; leave this GPU out")
        elif device.architecture not in seen.architectures:
            what = f"{device.name} is {device.architecture}; torch was built for {' '.join(seen.architectures)}"
            yield unsure(f"cuda:{num}", what, f"install a torch that was built for {device.architecture}")
    yield from _together(situation, seen)


def _together(situation: Situation, seen: TorchSeen) -> Iterator[Finding]:
    """Check the communication between two or more GPUs."""
    if len(seen.devices) < 2:
        return
    if seen.without_peers:
        pairs = ", ".join(f"{a}-{b}" for a, b in seen.without_peers)
        what = f"GPUs {pairs} reach each other through the host's memory"
        yield unsure("peers", what, "see `nvidia-smi topo -p2p r`")
    works, said = _run_probe(situation, "nccl")
    if works:
        yield ok("nccl", f"{len(seen.devices)} GPUs ran an all-reduce")
    else:
        what = f"{len(seen.devices)} GPUs cannot run an all-reduce: {said}"
        fix = "switch off ACS and IOMMU in the BIOS, or try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO gives details"
        yield wrong("nccl", what, fix)


def _run_probe(situation: Situation, what: str) -> tuple[bool, str]:
    """Run the probe; give True and the JSON, or False and the reason of the failure."""
    return last_line([sys.executable, "-m", _PROBE, what], timeout_s=_PROBE_S, environment=situation.environment)
