"""GPUs: what the driver lists, what CUDA_VISIBLE_DEVICES leaves of it, and, thoroughly, what torch can do with them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_rloo.config import Config
from areal_rloo.launcher.findings.base import Finding, Situation, ok, size, unsure, wrong

_NVIDIA_SMI_S = 10.0
_PROBE_S = 180.0
_PROBE = "areal_rloo.launcher.findings.probe_torch"
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_ON_CPU = "set learner.device=cpu and rollout.device=cpu"
_INSTALL = (
    f"install torch for the driver's CUDA into {sys.prefix} (https://pytorch.org/get-started/locally), or {_ON_CPU}"
)
_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"


class Device(msgspec.Struct, frozen=True):
    """A GPU as torch sees it. `works`: an empty string, or what went wrong when it was given something to compute."""

    name: str
    architecture: str
    works: str


class TorchSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What `probe_torch.py devices` prints. `cuda` and `nccl` are versions, or None in a build without them."""

    version: str
    cuda: str | None
    nccl: str | None
    architectures: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    trouble: str = ""  # why there are no devices, in torch's words
    without_peers: tuple[tuple[int, int], ...] = ()  # pairs that reach each other through the host only


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A line of nvidia-smi."""

    index: str
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    driver: str


def check_gpus(situation: Situation) -> Iterator[Finding]:
    """The driver answers, what is visible is there, and nobody else uses it."""
    visible = situation.environment.get("CUDA_VISIBLE_DEVICES")
    listed = _listed(situation)
    if isinstance(listed, Finding):
        yield listed
        return
    if not listed:
        yield from _without_gpus(situation.config, visible)
        return
    shown, absent = _visible(listed, visible)
    if absent:
        what = f"{visible}: no GPU {', '.join(absent)} here, and CUDA shows none from there on"
        indices = ",".join(gpu.index for gpu in listed)
        yield wrong("CUDA_VISIBLE_DEVICES", what, f"unset it, or choose among {indices}")
    elif not shown:
        what = f"empty: {len(listed)} GPUs are hidden"
        fix = "unset CUDA_VISIBLE_DEVICES"
        wanted = situation.config is not None and _asks_for_gpu(situation.config)
        yield wrong("CUDA_VISIBLE_DEVICES", what, fix) if wanted else unsure("CUDA_VISIBLE_DEVICES", what, fix)
    else:
        names = ", ".join(sorted({gpu.name for gpu in shown}))
        yield ok("gpus", f"{len(shown)} of {len(listed)} ({names}), driver {listed[0].driver}")
    yield from _busy(shown)
    if shown and _built_without_cuda():
        what = f"built without CUDA, and {len(shown)} GPUs are here"
        on_cpu = situation.config is not None and not _may_use_gpu(situation.config)
        yield unsure("torch", what, _INSTALL) if on_cpu else wrong("torch", what, _INSTALL)


def check_torch(situation: Situation) -> Iterator[Finding]:
    """Torch can be imported, sees the GPUs that are visible, and computes on each."""
    seen = _probe_torch(situation)
    if isinstance(seen, Finding):
        yield seen
        return
    cuda = f"CUDA {seen.cuda}" if seen.cuda else "no CUDA"
    yield ok("torch", f"{seen.version}, {cuda}, NCCL {seen.nccl or 'none'}, {len(seen.devices)} GPUs")
    listed = _listed(situation)
    if not isinstance(listed, Finding) and seen.cuda is not None:
        shown, _ = _visible(listed, situation.environment.get("CUDA_VISIBLE_DEVICES"))
        if len(seen.devices) < len(shown):
            what = f"sees {len(seen.devices)} of {len(shown)} GPUs. {seen.trouble}".rstrip()
            yield wrong("torch", what, f"update the NVIDIA driver (it is {shown[0].driver}), or {_INSTALL}")
    for num, device in enumerate(seen.devices):
        if device.works:
            yield wrong(
                f"cuda:{num}", f"{device.name}: {device.works}", "see `dmesg` and `nvidia-smi -q`; leave it out"
            )
        elif device.architecture not in seen.architectures:
            what = f"{device.name} is {device.architecture}; torch was built for {' '.join(seen.architectures)}"
            yield unsure(f"cuda:{num}", what, "install a torch that was built for it")
    yield from _together(situation, seen)


def _together(situation: Situation, seen: TorchSeen) -> Iterator[Finding]:
    """Two GPUs and more: do they talk?"""
    if len(seen.devices) < 2:
        return
    if seen.without_peers:
        pairs = ", ".join(f"{a}-{b}" for a, b in seen.without_peers)
        yield unsure(
            "peers", f"GPUs {pairs} reach each other through the host's memory", "see `nvidia-smi topo -p2p r`"
        )
    done = _run_probe(situation, "nccl")
    if isinstance(done, str):
        what = f"{len(seen.devices)} GPUs cannot add up together: {done}"
        fix = "switch off ACS and IOMMU in the BIOS, or try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO says more"
        yield wrong("nccl", what, fix)
    else:
        yield ok("nccl", f"{len(seen.devices)} GPUs added up together")


def _probe_torch(situation: Situation) -> TorchSeen | Finding:
    done = _run_probe(situation, "devices")
    if isinstance(done, str):
        fix = f"{sys.executable} -m pip install --force-reinstall 'torch>=2.11'"
        return wrong("torch", f"cannot be imported or asked: {done}", fix)
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=TorchSeen)


def _listed(situation: Situation) -> tuple[_Gpu, ...] | Finding:
    """What the driver lists; empty without one."""
    program = shutil.which("nvidia-smi", path=situation.environment.get("PATH"))
    if program is None:
        if any(file.exists() for file in _DEVICE_FILES[:1]):
            return unsure("gpus", "there are GPUs, and no nvidia-smi in PATH", "put nvidia-smi into PATH")
        return ()
    try:
        command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return wrong("gpus", f"nvidia-smi does not answer: {error}", "look at `dmesg`; the driver may want a reboot")
    if done.returncode:
        said = " ".join((done.stdout or done.stderr).split())[:300]
        return wrong("gpus", f"nvidia-smi fails: {said}", "reload the NVIDIA driver, or reboot")
    return tuple(_read(line) for line in done.stdout.splitlines() if line.count(",") == _FIELDS.count(","))


def _read(line: str) -> _Gpu:
    index, uuid, name, total, used, driver = (part.strip() for part in line.split(","))
    return _Gpu(index, uuid, name, _mebibytes(total), _mebibytes(used), driver)


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0  # [N/A] where the memory is the host's


def _visible(listed: tuple[_Gpu, ...], variable: str | None) -> tuple[list[_Gpu], list[str]]:
    """What CUDA shows, and the names that it does not know."""
    if variable is None:
        return list(listed), []
    shown, absent = [], []
    for name in (part.strip() for part in variable.split(",") if part.strip()):
        if name.startswith("MIG-"):
            continue  # a part of one, which this list does not have
        found = next((gpu for gpu in listed if name == gpu.index or gpu.uuid.startswith(name)), None)
        if found is None:
            absent.append(name)
        else:
            shown.append(found)
    return shown, absent


def _without_gpus(config: Config | None, visible: str | None) -> Iterator[Finding]:
    named = [part for part in (visible or "").split(",") if part.strip()]
    if named and not any(file.exists() for file in _DEVICE_FILES):
        what = f"{visible}: there is no driver of GPUs here"
        yield wrong("CUDA_VISIBLE_DEVICES", what, f"unset it, or {_ON_CPU}")
    elif config is not None and _asks_for_gpu(config):
        devices = f"learner.device={config.learner.device}, rollout.device={config.rollout.device}"
        yield wrong("gpus", f"{devices}, and there is none here", _ON_CPU)
    else:
        yield ok("gpus", "none")


def _busy(shown: list[_Gpu]) -> Iterator[Finding]:
    for gpu in shown:
        share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else 0.0
        what = f"{size(gpu.used_bytes)} of {size(gpu.total_bytes)} are taken"
        fix = "end the processes that `nvidia-smi` shows, or choose others with CUDA_VISIBLE_DEVICES"
        if share > 0.5:
            yield wrong(f"gpu {gpu.index}", what, fix)
        elif gpu.used_bytes > 2**30:
            yield unsure(f"gpu {gpu.index}", what, fix)


def _asks_for_gpu(config: Config) -> bool:
    rollout = config.rollout.device.startswith("cuda") and not config.rollout.server_urls
    return rollout or config.learner.device.startswith("cuda")


def _may_use_gpu(config: Config) -> bool:
    return _asks_for_gpu(config) or "auto" in (config.learner.device, config.rollout.device)


def _built_without_cuda() -> bool:
    """Whether torch says so in its files; it is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*= *None", text, re.MULTILINE) is not None


def _run_probe(situation: Situation, what: str) -> subprocess.CompletedProcess[str] | str:
    """The probe that ended well, or what became of it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROBE, what],
            env=dict(situation.environment), capture_output=True, text=True, timeout=_PROBE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done within {_PROBE_S:g} s"
    if done.returncode == 0:
        return done
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
