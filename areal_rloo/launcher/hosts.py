"""The hosts of a run, as a launcher finds them or as the config describes them; GPUs that runs keep apart."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import psutil

from areal_rloo.config import LauncherConfig
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.placement import Host

_NVIDIA_SMI_TIMEOUT_S = 10


def this_host(launcher: LauncherConfig) -> Host:
    """Cores this process may use, GPUs as the driver lists them, and memory, capped as the config says; no torch.

    Raises:
        PreflightError: the driver does not answer, or there are fewer GPUs than the config says.
    """
    found = Host(socket.gethostname(), "127.0.0.1", num_cores(), _gpu_ids(), psutil.virtual_memory().total)
    return capped(found, launcher)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def described_hosts(launcher: LauncherConfig) -> list[Host]:
    """What the config says of hosts that are not there yet; nothing else is known of them."""
    return [
        Host(
            f"host-{index}",
            f"host-{index}",
            launcher.cores_per_host or 1,
            tuple(str(gpu) for gpu in range(launcher.gpus_per_host or 0)),
            launcher.memory_per_host,
        )
        for index in range(launcher.num_hosts)
    ]


def capped(host: Host, launcher: LauncherConfig) -> Host:
    """A host with no more than the config lets a run use of it.

    Raises:
        PreflightError: it has fewer GPUs than the config says.
    """
    gpu_ids = host.gpu_ids if launcher.gpus_per_host is None else host.gpu_ids[: launcher.gpus_per_host]
    if launcher.gpus_per_host is not None and len(gpu_ids) < launcher.gpus_per_host:
        raise PreflightError(
            f"launcher.gpus_per_host: expected {launcher.gpus_per_host} GPUs on {host.name}, which has "
            f"{len(gpu_ids)}, {launcher.gpus_per_host - len(gpu_ids)} too few; lower it, or leave it out"
        )
    return Host(
        host.name,
        host.address,
        min(host.num_cores, launcher.cores_per_host or host.num_cores),
        gpu_ids,
        min(host.memory_bytes, launcher.memory_per_host or host.memory_bytes),
    )


def _gpu_ids() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [part.strip() for part in visible.split(",") if part.strip()]
        return tuple(itertools.takewhile(lambda gpu_id: not gpu_id.startswith("-"), ids))  # as CUDA reads it
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(
            f"gpus: nvidia-smi does not answer: {error}; look at `dmesg`, the driver may want a reboot, or set "
            "CUDA_VISIBLE_DEVICES"
        ) from error
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


class ClaimedGpus:
    """GPUs of this host that no other run of the local launcher takes while they are held, whoever's it is.

    A lock on a file for each; the kernel lets it go with the process that holds it, however that ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / "areal_rloo-gpus"
        self._files: dict[str, IO[bytes]] = {}
        self._turn: IO[bytes] | None = None

    def claim(self, host: Host) -> Host:
        """The host with those of its GPUs that nobody has; they are ours until `keep` or `close`.

        Until then other runs wait here, so that none takes for missing what this one is about to give back.
        """
        if not host.gpu_ids:
            return host
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir()
            self._folder.chmod(0o1777)  # everybody's, whatever our umask
        self._turn = self._opened(".turn")
        if self._turn is not None:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        for gpu_id in host.gpu_ids:
            if (file := self._opened(gpu_id)) is None:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            self._files[gpu_id] = file
        return dataclasses.replace(host, gpu_ids=tuple(gpu for gpu in host.gpu_ids if gpu in self._files))

    def keep(self, gpu_ids: Iterable[str]) -> None:
        """Let all others go, and the next run choose."""
        for gpu_id in self._files.keys() - set(gpu_ids):
            self._files.pop(gpu_id).close()
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def close(self) -> None:
        self.keep(())

    def _opened(self, gpu_id: str) -> IO[bytes] | None:
        """The file of a GPU; None where it is another user's and closed to us, as the GPU then is."""
        path = self._folder / gpu_id.replace("/", "_")
        with contextlib.suppress(OSError):
            path.touch()
            path.chmod(0o666)  # everybody's, whatever our umask
        try:
            return path.open("rb")
        except OSError:
            return None
