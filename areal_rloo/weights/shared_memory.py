"""Weights through shared memory, on a single host: the learner gathers into a file in memory, and workers map the file.

The learner writes a segment again only after every worker with an offer has taken the segment. A segment that a
silent worker may still read is given up: the name is removed, and the memory is freed when the worker unmaps it. So a
worker that wakes up late still reads whole weights.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.files import ScratchFolder
from areal_rloo.weights.manifest import Manifest, SharedMemoryOffer


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    buckets: list[Tensor]
    readers: set[str] = field(default_factory=set)
    given_up: bool = False


class SharedMemorySender:
    """The segments of a learner, in a scratch folder. `CollectiveSender` has the same methods."""

    needs_all = False  # True if all present workers take part in every broadcast, even with the version already loaded

    def __init__(self, manifest: Manifest, parent: Path) -> None:
        self._manifest = manifest
        self._scratch = ScratchFolder(parent, "segments")
        self._in_use: list[_Segment] = []
        self._free: list[_Segment] = []
        self._num_made = 0

    async def stage(self) -> Sequence[Tensor]:
        """Return buckets that no worker reads."""
        self._in_use.append(self._free.pop() if self._free else await asyncio.to_thread(self._made))
        return self._in_use[-1].buckets

    async def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> SharedMemoryOffer:
        """Return the offer to send to these workers."""
        segment = self._of(buckets)
        segment.readers.update(worker_ids)
        return SharedMemoryOffer(str(segment.path))

    async def send(self, buckets: Sequence[Tensor]) -> None:
        """Nothing to do: the workers read the segment themselves."""

    def taken(self, worker_id: str) -> None:
        """Record that this worker has the version of the last offer and has finished reading."""
        for segment in self._in_use:
            segment.readers.discard(worker_id)

    def lost(self, worker_id: str) -> None:
        """Record that this worker may still read, at any later time, the buckets of an offer."""
        for segment in self._in_use:
            segment.given_up |= worker_id in segment.readers

    def release(self, buckets: Sequence[Tensor]) -> None:
        """Free these buckets: a newer version replaces theirs."""
        segment = self._of(buckets)
        self._in_use.remove(segment)
        if segment.given_up or segment.readers:
            segment.path.unlink(missing_ok=True)
        else:
            self._free.append(segment)

    def close(self) -> None:
        self._in_use.clear()
        self._free.clear()
        self._scratch.close()

    def _of(self, buckets: Sequence[Tensor]) -> _Segment:
        return next(segment for segment in self._in_use if segment.buckets is buckets)

    def _made(self) -> _Segment:
        path = self._scratch.path / f"segment-{self._num_made}"  # a worker may still map the last learner's
        self._num_made += 1
        size = self._manifest.total_bytes
        try:
            with path.open("xb") as file:
                _allocate(file.fileno(), size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise WeightsError(
                f"{self._scratch.path}: a version of the weights needs {size} bytes of shared memory: "
                f"{error.strerror}; enlarge the shared memory or set weights.transport=collective"
            ) from error
        return _Segment(path, _map(path, self._manifest))


class SharedMemoryReader:
    """Maps offered segments, and keeps a few mapped: segments rotate, and a new mapping costs a page fault per page."""

    def __init__(self) -> None:
        self._mapped: dict[str, list[Tensor]] = {}

    def take(self, offer: SharedMemoryOffer, manifest: Manifest) -> Sequence[Tensor]:
        """Map the buckets. Read them only: the learner alone writes.

        Raises:
            WeightsError: the segment is gone because a newer version replaced it.
        """
        buckets = self._mapped.pop(offer.path, None)
        if buckets is None:
            try:
                buckets = _map(Path(offer.path), manifest)
            except (OSError, ValueError) as error:
                raise WeightsError(f"segment {offer.path} cannot be mapped: {error}") from error
        self._mapped[offer.path] = buckets
        while len(self._mapped) > 3:
            del self._mapped[next(iter(self._mapped))]
        return buckets


def _allocate(descriptor: int, size: int) -> None:
    """Give a file its memory now: if a write to mapped memory finds none, the kernel kills the process."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


def _map(path: Path, manifest: Manifest) -> list[Tensor]:
    """Map the buckets of a segment, each [num_bytes] uint8."""
    with path.open("r+b") as file:
        flat = torch.frombuffer(mmap.mmap(file.fileno(), manifest.total_bytes), dtype=torch.uint8)
    return list(flat.split(list(manifest.bucket_num_bytes)))
