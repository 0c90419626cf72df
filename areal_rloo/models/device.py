"""Memory, streams and copies of a device: the only questions to CUDA that a test answers without a GPU.

A CPU computes in order and has no streams, so most functions do nothing there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from areal_rloo import container_limits


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
