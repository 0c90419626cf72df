"""Measure the peak memory of a block of code, on a CPU by the kernel's count, on a GPU by torch's allocator."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from benchmarks import hardware


class Peak:
    """The memory of tensors above the level at the start; on a CPU, that of the process.

    A CPU's allocator must return freed memory at once for an exact number (`EXACT` in learner_memory.py).
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(device)
            self._held_before = torch.cuda.memory_reserved(device)
        else:
            self._before = hardware.status_bytes("VmRSS")

    def restart(self) -> None:
        """Forget the peak until now; the level at the start stays."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return hardware.status_bytes("VmHWM") - self._before

    @property
    def held_bytes(self) -> int:
        """Return the bytes that the allocator holds at the peak; on a CPU the same as `num_bytes`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return self.num_bytes

    @property
    def grown_bytes(self) -> int:
        """Return by how much the memory that the allocator holds grew; recorded steps are part of it."""
        return self.held_bytes - self._held_before if self._device.type == "cuda" else self.num_bytes


def finish(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
