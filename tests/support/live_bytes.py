"""Counts the bytes of all tensors that exist at the same time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made on a device while it is active; `peak` is the most at the same time."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made
