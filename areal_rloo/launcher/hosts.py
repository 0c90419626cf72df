"""The hosts of a run: this machine or hosts as the config describes them, and a lock for each GPU of a local run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pynvml
from filelock import BaseFileLock

from areal_rloo.config import LauncherConfig
from areal_rloo.errors import PreflightError
from areal_rloo.files import lock_file
from areal_rloo.launcher.placement import Host
from areal_rloo.learner.memory import in_gib
from areal_rloo.telemetry.gpus import chosen_gpus, memory_of
from areal_rloo.waiting import call_within

_DRIVER_TIMEOUT_S = 10.0
_CHOICE_TIMEOUT_S = 600.0


class DriverError(Exception):
    """The NVIDIA driver is installed but reports an error or does not answer."""


def this_host(launcher: LauncherConfig) -> Host:
    """Find the usable cores, the GPUs of the driver and the memory, within the limits of the config; without torch.

    Raises:
        PreflightError: the driver does not answer, or there are fewer GPUs than the config asks for.
    """
    memory_bytes = psutil.virtual_memory().total
    gpu_ids = _gpu_ids()
    gpu_bytes = _gpu_bytes() if gpu_ids else 0  # hidden or absent GPUs: do not ask the driver, which may hang
    found = Host(socket.gethostname(), "127.0.0.1", num_cores(), gpu_ids, memory_bytes, gpu_bytes)
    return capped(found, launcher)


def real_host(launcher: LauncherConfig) -> Host:
    """Find this host for a start; GPUs of the config alone are refused.

    Raises:
        PreflightError: as `this_host`, or the config describes the memory of a GPU, and there is none.
    """
    host = this_host(launcher)
    if launcher.memory_per_gpu and not host.gpu_ids:
        raise PreflightError(
            f"launcher.memory_per_gpu: expected a GPU on {host.name}, which has none; leave it out, or add --dry-run "
            "for the plan of a described GPU"
        )
    return host


def host_to_show(launcher: LauncherConfig) -> tuple[Host, str]:
    """Give this host for a dry run, or a host with GPUs as described, if the config asks for more GPUs than are here.

    `launcher.memory_per_gpu` alone describes one GPU. The text says which GPUs are described; empty if all were found.
    """
    found = this_host(msgspec.structs.replace(launcher, gpus_per_host=None))
    num_here, wanted = len(found.gpu_ids), _num_described(launcher)
    if wanted <= num_here:
        return capped(found, launcher), ""
    host = dataclasses.replace(
        found,
        num_cores=launcher.cores_per_host or found.num_cores,
        gpu_ids=tuple(map(str, range(wanted))),
        memory_bytes=launcher.memory_per_host,  # 0: that of the other host is unknown
    )
    memory = in_gib(host.gpu_bytes) if host.gpu_bytes else "unknown memory (launcher.memory_per_gpu)"
    words = f"GPUs described, not found: {wanted} of {memory}; {host.name} has {num_here}, so a start here is refused"
    if not launcher.cores_per_host:
        words += f"; the plan has the {found.num_cores} cores of {host.name} (launcher.cores_per_host describes others)"
    return host, words


def _num_described(launcher: LauncherConfig) -> int:
    """Return the number of GPUs that a config describes for each host; their memory alone describes one."""
    given = launcher.gpus_per_host
    return int(launcher.memory_per_gpu > 0) if given is None else given


def num_cores() -> int:
    """Count the usable cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refused_here(launcher: LauncherConfig) -> str:
    """Say why the local launcher refuses the number of hosts; empty if not."""
    if launcher.num_hosts == 1:
        return ""
    return (
        f"launcher.num_hosts: expected 1 with the local launcher, got {launcher.num_hosts}; "
        "start it with areal_rloo.launcher.ray or areal_rloo.launcher.slurm"
    )


def described_hosts(launcher: LauncherConfig) -> list[Host]:
    """Make hosts from the numbers of the config, for a run whose real hosts are not known yet."""
    gpu_ids = tuple(str(gpu) for gpu in range(_num_described(launcher)))
    names = [f"host-{index}" for index in range(launcher.num_hosts)]
    cores, memory_bytes = launcher.cores_per_host or 1, launcher.memory_per_host
    return [Host(name, name, cores, gpu_ids, memory_bytes, launcher.memory_per_gpu) for name in names]


def capped(host: Host, launcher: LauncherConfig) -> Host:
    """Lower the cores, GPUs and memory of a host to the limits of the config.

    Raises:
        PreflightError: the host has fewer GPUs than the config asks for.
    """
    gpu_ids, wanted = host.gpu_ids[: launcher.gpus_per_host], launcher.gpus_per_host or 0
    if len(gpu_ids) < wanted:
        raise PreflightError(
            f"launcher.gpus_per_host: expected {wanted} GPUs on {host.name}, which has {len(gpu_ids)}, "
            f"{wanted - len(gpu_ids)} too few; lower it, or leave it out"
        )
    return dataclasses.replace(
        host,
        num_cores=min(host.num_cores, launcher.cores_per_host or host.num_cores),
        gpu_ids=gpu_ids,
        memory_bytes=min(host.memory_bytes, launcher.memory_per_host or host.memory_bytes),
        gpu_bytes=launcher.memory_per_gpu or host.gpu_bytes,
    )


def _gpu_ids() -> tuple[str, ...]:
    if (chosen := chosen_gpus()) is not None:
        return chosen
    try:
        return tuple(gpu.index for gpu in list_gpus() or ())
    except DriverError as error:
        raise PreflightError(
            f"gpus: {error}; see `dmesg`, reload the NVIDIA driver or reboot, or set CUDA_VISIBLE_DEVICES"
        ) from error


def _gpu_bytes() -> int:
    """Give the memory of the smallest GPU that the driver lists; 0 if it is unknown."""
    try:
        return min((gpu.total_bytes for gpu in list_gpus() or ()), default=0)
    except DriverError:
        return 0  # `_gpu_ids` and the doctor report the error


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver reports it. Memory is 0 bytes if the GPU shares the memory of the host."""

    index: str
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    driver: str


def list_gpus() -> tuple[Gpu, ...] | None:
    """List the GPUs of the driver, whatever CUDA_VISIBLE_DEVICES says; None without a driver.

    Raises:
        DriverError: the driver reports an error or does not answer in time.
    """
    try:
        return call_within(_DRIVER_TIMEOUT_S, _ask_driver)
    except TimeoutError as error:
        raise DriverError(f"the NVIDIA driver does not answer: {error}") from error
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise DriverError(f"the NVIDIA driver fails: {error}") from error


def _ask_driver() -> tuple[Gpu, ...]:
    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        return tuple(_gpu(index, driver) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, driver: str) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    used_bytes, total_bytes = memory_of(handle)
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Gpu(str(index), uuid, name, total_bytes, used_bytes, driver)


class ClaimedGpus:
    """Locks GPUs of this host against other local runs of any user. Each lock ends with the process."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / "areal_rloo-gpus"
        self._locks: dict[str, BaseFileLock] = {}
        self._turn: BaseFileLock | None = None

    def claim(self, host: Host, *, timeout_s: float = _CHOICE_TIMEOUT_S) -> Host:
        """Lock all free GPUs of the host, until `keep` or `close`; give the host with these GPUs only.

        Another run waits here until `keep` or the timeout, because this run may release some of the GPUs.

        Raises:
            PreflightError: the name of the folder for the locks is a link or a file.
        """
        if not host.gpu_ids:
            return host
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir()
            self._folder.chmod(0o1777)  # for all users, whatever the umask
        if not stat.S_ISDIR(self._folder.lstat().st_mode):  # another user may choose where a link leads to
            raise PreflightError(f"{self._folder}: expected a folder, for the locks of GPUs; remove this file or link")
        self._turn = self._locked(".turn", timeout_s=timeout_s)
        for gpu_id in host.gpu_ids:
            if gpu_id not in self._locks and (lock := self._locked(gpu_id)) is not None:
                self._locks[gpu_id] = lock
        return dataclasses.replace(host, gpu_ids=tuple(gpu for gpu in host.gpu_ids if gpu in self._locks))

    def keep(self, gpu_ids: Iterable[str]) -> None:
        """Release all other GPUs, and let the next run choose."""
        for gpu_id in self._locks.keys() - set(gpu_ids):
            self._locks.pop(gpu_id).release()
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def close(self) -> None:
        self.keep(())

    def _locked(self, name: str, *, timeout_s: float = 0.0) -> BaseFileLock | None:
        """Lock a file; None if another run holds the lock, or if the file of another user is closed to this user."""
        with contextlib.suppress(OSError):
            return lock_file(self._folder / name.replace("/", "_"), timeout_s=timeout_s, mode=0o666)
        return None
