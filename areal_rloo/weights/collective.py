"""Weights through torch.distributed: one broadcast a bucket, Gloo on CPU and NCCL on GPU, on one code path.

The sender is rank 0. Whoever is present forms an epoch: a process group of its own over a store of its own. When the
set of workers changes, or a broadcast failed, the next broadcast begins a new epoch. A store that closes lets go those
who still wait in it for somebody who will not come. The groups are made directly, not through the process-wide default
group, so they collide with nobody's.

A worker is one rank, this process's own `CollectiveReader`, or, where an SGLang server takes the weights itself, one
rank for each of the server's. Such a server meets the others through torch's `_new_process_group_helper`, so `_group`
looks for them in the store under the names that function uses.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from areal_rloo.errors import WeightsError, first_line
from areal_rloo.weights.manifest import CollectiveOffer, Manifest, empty_buckets

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    _Group = ProcessGroupGloo | ProcessGroupNCCL

_LOOK_EVERY_S = 0.001
_IN_FLIGHT = 2  # broadcasts under way together: the next one's start hides behind the other's end


class CollectiveSender:
    """Rank 0 of every epoch, and the host of the store."""

    needs_all = True

    def __init__(
        self, manifest: Manifest, *, host: str, device: torch.device, timeout_s: float, ranks_per_worker: int = 1
    ) -> None:
        self._manifest = manifest
        self._host = host
        self._ranks_per_worker = ranks_per_worker
        self._device = device
        self._timeout_s = timeout_s
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._store: TCPStore | None = None
        self._run = secrets.token_hex(4)  # a server may know the epochs of another run
        self._epoch = 0
        self._members: frozenset[str] = frozenset()
        self._world_size = 1  # of the epoch; members may be lost while it is being formed
        self._group: _Group | None = None
        self._free: list[Sequence[Tensor]] = []
        self._stream: torch.cuda.Stream | None = None

    def stage(self) -> Sequence[Tensor]:
        """In CPU memory: a GPU has two buckets of it at a time, on their way."""
        if self._free:
            return self._free.pop()
        return empty_buckets(self._manifest, torch.device("cpu"), pinned=self._device.type == "cuda")

    def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> CollectiveOffer:
        if self._group is None or self._store is None or frozenset(worker_ids) != self._members:
            self._epoch += 1
            self._group = None
            self._members = frozenset(worker_ids)
            self._world_size = 1 + len(self._members) * self._ranks_per_worker
            timeout = timedelta(seconds=self._timeout_s)
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return CollectiveOffer(
            host=self._host,
            port=self._store.port,
            name=self._name,
            ranks={
                worker_id: 1 + index * self._ranks_per_worker for index, worker_id in enumerate(sorted(self._members))
            },
            world_size=self._world_size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )

    def send(self, buckets: Sequence[Tensor]) -> None:
        assert self._store is not None, "what is sent was offered"
        try:
            if self._group is None:
                self._group = _group(
                    self._store, self._name, 0, self._world_size, self._backend, self._host, self._timeout_s
                )
            with self._own_stream():
                on_device = _on_device(buckets, self._device)
                _broadcast(self._group, self._manifest, on_device, self._device, self._timeout_s)
        except RuntimeError as error:
            self._group = self._store = None
            raise WeightsError(f"{self._name}: {first_line(error)}") from error

    def _own_stream(self) -> AbstractContextManager[object]:
        """So that copies to a GPU neither wait for the training's kernels nor hold them up."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)

    def taken(self, worker_id: str) -> None:
        """Nothing of a worker's reading is left here once the collective is done."""

    def lost(self, worker_id: str) -> None:
        if worker_id in self._members:
            self._members = frozenset()

    def release(self, buckets: Sequence[Tensor]) -> None:
        self._free.append(buckets)

    def close(self) -> None:
        self._group = self._store = None
        self._free.clear()

    @property
    def _name(self) -> str:
        return f"areal_rloo-{self._run}-{self._epoch}"


class CollectiveReader:
    """A worker's rank in the current epoch, and the second buffer it receives into."""

    def __init__(self, worker_id: str, device: torch.device) -> None:
        self._worker_id = worker_id
        self._device = device
        self._name: str | None = None
        self._group: _Group | None = None
        self._buckets: Sequence[Tensor] = ()

    def take(self, offer: CollectiveOffer, manifest: Manifest) -> Sequence[Tensor]:
        """Receive every bucket; blocks until they are here.

        Raises:
            WeightsError: the broadcast failed or took too long.
        """
        if [len(bucket) for bucket in self._buckets] != list(manifest.bucket_num_bytes):
            self._buckets = empty_buckets(manifest, self._device)
        try:
            if self._group is None or offer.name != self._name:
                self._group = None
                timeout = timedelta(seconds=offer.timeout_s)
                store = TCPStore(offer.host, offer.port, is_master=False, timeout=timeout)
                rank = offer.ranks[self._worker_id]
                self._group = _group(
                    store, offer.name, rank, offer.world_size, offer.backend, offer.host, offer.timeout_s
                )
                self._name = offer.name
            _broadcast(self._group, manifest, self._buckets, self._device, offer.timeout_s)
        except RuntimeError as error:
            self._group = None
            raise WeightsError(f"{offer.name}: {first_line(error)}") from error
        return self._buckets


def _on_device(buckets: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Buckets one after the other on a device that holds as many as are under way; the next one replaces the oldest."""
    if device.type == "cpu":
        yield from buckets
        return
    longest = max(map(len, buckets))
    held = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(_IN_FLIGHT)]
    for index, bucket in enumerate(buckets):
        yield held[index % _IN_FLIGHT][: len(bucket)].copy_(bucket, non_blocking=True)


def _broadcast(
    group: _Group, manifest: Manifest, buckets: Iterable[Tensor], device: torch.device, timeout_s: float
) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    ends_s = time.monotonic() + timeout_s
    under_way = []
    for bucket, num_bytes in zip(buckets, manifest.filled_bytes, strict=True):
        under_way.append(group.broadcast([bucket[:num_bytes]], options))  # type: ignore[union-attr]
        if len(under_way) == _IN_FLIGHT:
            _finish(under_way.pop(0), group, device, ends_s)
    for work in under_way:
        _finish(work, group, device, ends_s)


def _finish(work: Work, group: _Group, device: torch.device, ends_s: float) -> None:
    """Wait for a broadcast. NCCL's own wait only orders streams, and its timeout ends the process: we look instead."""
    while device.type == "cuda" and not work.is_completed():
        if time.monotonic() > ends_s:
            group.abort()
            raise RuntimeError("somebody did not take part in time")
        time.sleep(_LOOK_EVERY_S)
    work.wait()


def _group(store: Store, name: str, rank: int, size: int, backend: str, host: str, timeout_s: float) -> _Group:
    """Meet the others of an epoch; blocks until all are here."""
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 - absent from CPU builds of torch

        options = ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # ours comes first, and ends the broadcast alone
        return ProcessGroupNCCL(prefixed, rank, size, options)
    gloo_options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo_options._timeout = timeout
    gloo_options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return ProcessGroupGloo(prefixed, rank, size, gloo_options)


def address_towards(host: str) -> str:
    """This machine's address on the way to a host; Gloo would otherwise guess from the machine's name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address: str = probe.getsockname()[0]
        return address
