"""Memory, streams and copies of a device: the only questions to CUDA that a test answers without a GPU.

A CPU computes in order and has no streams, so most functions do nothing there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from areal_rloo import container_limits
from areal_rloo.errors import PreflightError, first_line
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

FLASH_GENERATION = 8  # of GPUs: the first with flash attention
_ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


class DeviceMemory(NamedTuple):
    """The memory of a GPU for all processes, or of this container."""

    free_bytes: int
    total_bytes: int


def memory_of(device: torch.device) -> DeviceMemory:
    """Ask the driver for the memory of a GPU, or the control groups for the memory of the CPU."""
    if device.type == "cuda":
        return DeviceMemory(*torch.cuda.mem_get_info(device))
    total, available = container_limits.memory()
    return DeviceMemory(available, total)


def check_flash(device: torch.device, dtype: torch.dtype) -> None:
    """Raise PreflightError if packed rows of this dtype need flash attention, which this GPU does not compute."""
    if device.type != "cuda" or dtype == torch.float32 or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability[0] < FLASH_GENERATION:
        raise PreflightError(
            f"model.dtype: {str(dtype).removeprefix('torch.')} needs flash attention, which GPUs compute from compute "
            f"capability {FLASH_GENERATION}.0 on (A100, RTX 30), and this one has {capability[0]}.{capability[1]}; set "
            "model.dtype=float32"
        )


def grow_segments(device: torch.device) -> None:
    """Let torch grow its blocks of GPU memory, before the first use of a GPU; settings of the user stay.

    With blocks of fixed sizes, a train step with 81 GiB of tensors held 88 GiB of an H200; with growing blocks 81.4.
    Some virtual GPUs and WSL2 refuse the calls of the driver for this, at the first allocation.
    """
    if device.type != "cuda" or _ALLOCATOR_SETTINGS & os.environ.keys():
        return
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        logger.warning(
            "blocks of GPU memory have fixed sizes here, because the driver refuses others: %s", first_line(error)
        )
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def avoid_plans_of_shapes(device: torch.device) -> None:
    """Let this process use no attention of cuDNN, which plans each new shape: 44 ms on an H200, and 1.1 s at first.

    An engine has new shapes all the time.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def finish_stream(device: torch.device) -> None:
    """Wait for the work of the thread's stream. Other streams, such as that of a broadcast, go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors on the way to CPU memory, without a wait of the host; pinned memory if they come from a GPU."""

    tensors: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None

    @classmethod
    def begin(cls, *tensors: Tensor) -> HostCopy:
        """Start copies on the thread's stream, after the work that computes the tensors."""
        if tensors[0].device.type != "cuda":
            return cls(tensors, None)
        copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(tensors[0].device))
        return cls(copies, arrived)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors as soon as they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensors


class SideStream:
    """A stream beside the stream of the training, so that copies and training kernels do not wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def used(self) -> AbstractContextManager[object]:
        """Work on this stream in the block; the first use makes the stream."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)


class GraphRecorder:
    """Records the kernels of functions as CUDA graphs, which share memory; a CPU has nothing to record."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call the function; return a function with the same effect, as long as all memory stays in place.

        The function must not wait for the device. Memory that it allocates is overwritten by other recordings.
        """
        function()
        if self._pool is None:
            return function
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),  # other threads go on
            ):
                function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # another thread, perhaps of the user's code, waited for the whole device
            torch.cuda.set_stream(stream)
            logger.warning("a step could not be recorded, and launches each kernel: %s", first_line(error))
            return function
        return graph.replay
