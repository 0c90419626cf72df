"""Weights through torch.distributed: one broadcast a bucket, Gloo on CPU and NCCL on GPU, on one code path.

The sender is rank 0. The workers present form a process group over a separate store. When the set of workers
changes, or a broadcast fails, the next broadcast forms a new group. Closing a store releases every rank
that still waits there. Groups are made directly, so they collide with no other group of the process.

A worker is a single rank, the `CollectiveReader` of its process, or as many ranks as its server has. Such a
server meets the others through torch's `_new_process_group_helper`, so `_group` uses the same store prefixes.

Meeting and broadcasting block, so they run on daemon threads: a hung collective ends by a timeout, and must not
hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from areal_rloo.errors import WeightsError, first_line
from areal_rloo.models.device import SideStream
from areal_rloo.ports import address_towards
from areal_rloo.waiting import on_daemon_thread, wait_until
from areal_rloo.weights.manifest import CollectiveOffer, Manifest, empty_buckets
from areal_rloo.weights.rendezvous import join_store, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    _Group = ProcessGroupGloo | ProcessGroupNCCL

T = TypeVar("T")

_LOOK_EVERY_S = 0.001
_IN_FLIGHT = 2  # broadcasts under way together (`_on_device`): the start of the next hides behind the end of the first


class CollectiveSender:
    """Rank 0 of every group, and host of the store. `SharedMemorySender` has the same methods."""

    needs_all = True
    missing_bytes = 0

    def __init__(
        self, manifest: Manifest, *, host: str, device: torch.device, timeout_s: float, ranks_per_worker: int = 1
    ) -> None:
        self._manifest, self._host, self._device, self._timeout_s = manifest, host, device, timeout_s
        self._ranks_per_worker = ranks_per_worker
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._store: TCPStore | None = None
        self._run = secrets.token_hex(4)  # a server may know the groups of another run
        self._num_groups = 0
        self._members: frozenset[str] = frozenset()
        self._world_size = 1  # of the group; members may be lost while the group forms
        self._group: _Group | None = None
        self._free: list[Sequence[Tensor]] = []
        self._stream = SideStream(device)

    async def stage(self, gives_up: Callable[[], bool] = lambda: False) -> Sequence[Tensor]:
        """Return buckets in CPU memory: a GPU has two of them at a time, on their way."""
        if self._free:
            return self._free.pop()
        pinned = self._device.type == "cuda"
        return await asyncio.to_thread(empty_buckets, self._manifest, torch.device("cpu"), pinned=pinned)

    async def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> CollectiveOffer:
        """Return the offer to send to these workers.

        Raises:
            WeightsError: there is no store, e.g. because no file descriptor is left.
        """
        if self._group is None or self._store is None or frozenset(worker_ids) != self._members:
            self._num_groups += 1
            self._group = self._store = None
            self._members = frozenset(worker_ids)
            self._world_size = 1 + len(self._members) * self._ranks_per_worker
            try:
                self._store = await _on_daemon_thread(lambda: serve_store(self._host, 0, timeout_s=self._timeout_s))
            except (RuntimeError, OSError) as error:
                raise WeightsError(f"{self._name}: no store on {self._host}: {first_line(error)}") from error
        return CollectiveOffer(
            host=self._host,
            port=self._store.port,
            name=self._name,
            ranks={worker_id: 1 + index * self._ranks_per_worker for index, worker_id in enumerate(sorted(worker_ids))},
            world_size=self._world_size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )

    async def send(self, buckets: Sequence[Tensor]) -> None:
        """Move the buckets to the workers of the last offer, within the timeout.

        Raises:
            WeightsError: at least one worker did not receive them.
        """
        try:
            self._group = await _on_daemon_thread(lambda: self._send(buckets))
        except (RuntimeError, OSError) as error:
            self._group = self._store = None
            raise WeightsError(f"{self._name}: {_cause(error)}") from error

    def taken(self, worker_id: str) -> None:
        """Nothing to do: a worker reads nothing here once the collective is done."""

    def lost(self, worker_id: str) -> None:
        if worker_id in self._members:
            self._members = frozenset()

    def release(self, buckets: Sequence[Tensor]) -> None:
        self._free.append(buckets)

    def close(self) -> None:
        if self._group is not None and self._backend == "nccl":
            self._group.abort()  # no broadcast is under way; without this, torch warns at the end of the process
        self._group = self._store = None
        self._free.clear()

    def _send(self, buckets: Sequence[Tensor]) -> _Group:
        """Meet the ranks of the group unless they have met, and broadcast; returns the group."""
        assert self._store is not None, "`offer` comes before `send`"
        group, self._group = self._group, None  # only a broadcast that worked gives the group back
        if group is None:
            group = _group(self._store, self._name, 0, self._world_size, self._backend, self._host, self._timeout_s)
        with self._stream.used():
            _broadcast(group, self._manifest, _on_device(buckets, self._device), self._device, self._timeout_s)
        return group

    @property
    def _name(self) -> str:
        return f"areal_rloo-{self._run}-{self._num_groups}"


class CollectiveReader:
    """A worker's rank in the current group, and the buffers it receives into, separate from the engine's weights."""

    def __init__(self, worker_id: str, device: torch.device) -> None:
        self._worker_id, self._device = worker_id, device
        self._name: str | None = None
        self._group: _Group | None = None
        self._buckets: Sequence[Tensor] = ()

    async def take(self, offer: CollectiveOffer, manifest: Manifest) -> Sequence[Tensor]:
        """Receive every bucket.

        Raises:
            WeightsError: the broadcast failed or timed out, or the offer is for other workers.
        """
        rank = offer.ranks.get(self._worker_id)
        if rank is None:
            raise WeightsError(f"{offer.name}: the offer has no rank for {self._worker_id}")
        try:
            await _on_daemon_thread(lambda: self._take(offer, manifest, rank))
        except (RuntimeError, OSError) as error:
            self._group = None
            raise WeightsError(f"{offer.name}: {_cause(error)}") from error
        return self._buckets

    def _take(self, offer: CollectiveOffer, manifest: Manifest, rank: int) -> None:
        if [len(bucket) for bucket in self._buckets] != list(manifest.bucket_num_bytes):
            self._buckets = empty_buckets(manifest, self._device)
        if self._group is None or offer.name != self._name:
            self._group = None
            store = join_store(offer.host, offer.port, timeout_s=offer.timeout_s)
            self._group = _group(store, offer.name, rank, offer.world_size, offer.backend, offer.host, offer.timeout_s)
            self._name = offer.name
        _broadcast(self._group, manifest, self._buckets, self._device, offer.timeout_s)


def _cause(error: BaseException) -> str:
    """Return the first line of an error. The last line of torch's text names two versions of NCCL: add advice."""
    found = re.search(r"Mismatched NCCL version detected[^\n]*", str(error))
    if found is None:
        return first_line(error)
    return (
        f"{found[0].strip()}; install the torch and nvidia-nccl-cu* of the server in the learner's environment, or, on "
        "a single host, set weights.transport=shared_memory"
    )


async def _on_daemon_thread(work: Callable[[], T]) -> T:
    """Await the result of a function. The threads of `asyncio.to_thread` would hold up the end of the process."""
    return await asyncio.wrap_future(on_daemon_thread(work, name="collective"))


def _on_device(buckets: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the buckets on a device that has memory for two neighbours, of which the second replaces an earlier bucket.

    Every other bucket ends where the memory ends, so that a long bucket needs no second place as long.
    """
    if device.type == "cpu":
        yield from buckets
        return
    sizes = [*map(len, buckets), 0]
    held = torch.empty(max(map(sum, itertools.pairwise(sizes))), dtype=torch.uint8, device=device)
    for index, bucket in enumerate(buckets):
        first = len(held) - len(bucket) if index % 2 else 0
        yield held[first : first + len(bucket)].copy_(bucket, non_blocking=True)


def _broadcast(
    group: _Group, manifest: Manifest, buckets: Iterable[Tensor], device: torch.device, timeout_s: float
) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    ends_s = time.monotonic() + timeout_s
    under_way = []
    for bucket, num_bytes in zip(buckets, manifest.filled_bytes, strict=True):
        under_way.append(group.broadcast([bucket[:num_bytes]], options))  # type: ignore[union-attr]
        if len(under_way) == _IN_FLIGHT:
            _finish(under_way.pop(0), group, device, ends_s)
    for work in under_way:
        _finish(work, group, device, ends_s)


def _finish(work: Work, group: _Group, device: torch.device, ends_s: float) -> None:
    """Wait for a broadcast by polling: NCCL's own wait only orders streams, and its timeout kills the process."""
    if device.type == "cuda":
        left_s = ends_s - time.monotonic()
        if not wait_until(work.is_completed, timeout_s=left_s, look_every_s=_LOOK_EVERY_S):
            group.abort()
            raise RuntimeError("a rank did not take part in time")
    work.wait()


def _group(store: Store, name: str, rank: int, size: int, backend: str, host: str, timeout_s: float) -> _Group:
    """Meet the other ranks of a group; blocks until all are there."""
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 - absent from CPU builds of torch

        options = ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # ours ends the broadcast first; NCCL's ends the process
        return ProcessGroupNCCL(prefixed, rank, size, options)
    gloo_options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo_options._timeout = timeout
    gloo_options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return ProcessGroupGloo(prefixed, rank, size, gloo_options)
