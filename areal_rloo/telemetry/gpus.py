"""Memory and use of a process's visible GPUs, as counted by the driver (NVML): of all programs on them."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Annotated, Any, ClassVar

import msgspec
import pynvml

from areal_rloo.telemetry.metric import Metric


class GpuStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers by index of the GPU on its host; empty on a host without a driver."""

    metrics_prefix: ClassVar[str] = "gpu_"

    used_bytes: Annotated[dict[str, int], Metric("Memory of a GPU in use, by all programs", "bytes", label="gpu")]
    total_bytes: Annotated[dict[str, int], Metric("Memory of a GPU", "bytes", label="gpu")]
    busy_share: Annotated[dict[str, float], Metric("Share of the time with work on a GPU", "share", label="gpu")]


class Gpus:
    """Asks the driver at each scrape: the first call may wait for a hanging driver, and only this scrape waits."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] | None = None

    def statistics(self) -> GpuStatistics:
        """Read the numbers. Raises pynvml.NVMLError if the driver fails."""
        if self._handles is None:
            self._handles = _visible(chosen_gpus())
        memory = {index: memory_of(handle) for index, handle in self._handles.items()}
        busy = {}
        for index, handle in self._handles.items():
            with contextlib.suppress(pynvml.NVMLError_NotSupported):  # of a part of a GPU
                busy[index] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return GpuStatistics(
            used_bytes={index: used for index, (used, _) in memory.items()},
            total_bytes={index: total for index, (_, total) in memory.items()},
            busy_share=busy,
        )


def memory_of(handle: Any) -> tuple[int, int]:
    """Return the bytes in use and in all of a device of NVML; zeros if the GPU shares the memory of the host."""
    for version in (pynvml.nvmlMemory_v2, None):  # v2 excludes the driver's own share; drivers before 510 have v1 only
        with contextlib.suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version)
            return memory.used, memory.total
    return 0, 0


def chosen_gpus() -> tuple[str, ...] | None:
    """Read the indices and UUIDs in CUDA_VISIBLE_DEVICES, up to a negative one, as CUDA does; None: not set."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return None
    names = [part.strip() for part in variable.split(",") if part.strip()]
    return tuple(itertools.takewhile(lambda name: not name.startswith("-"), names))


def _visible(names: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the devices of these names; None: all. Parts of GPUs (MIG) are left out."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return {}
    handles = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        if names is None or any(
            name == str(index) or (name[:4] == uuid[:4] and uuid.startswith(name)) for name in names
        ):
            handles[str(index)] = handle
    return handles
