"""Weights through shared memory, on a single host: the learner gathers into a file in memory, and workers map the file.

The learner writes a segment again only after every worker with an offer has taken the segment. A segment that a
silent worker may still read is given up: the name is removed, and the memory is freed when the worker unmaps it. So a
worker that wakes up late still reads whole weights.

A segment has all its memory before the first write: a write into a full file system in memory would be SIGBUS, which
kills the learner. If the memory is full, `stage` waits, says so every 30 s, and fails after a deadline.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.files import ScratchFolder, remove_abandoned
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.weights.manifest import Manifest, SharedMemoryOffer

logger = get_logger(__name__)

_PATIENCE_S = 300.0  # for an operator, or for a worker mapping an old segment
_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 30.0


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    buckets: list[Tensor]
    readers: set[str] = field(default_factory=set)
    given_up: bool = False


class SharedMemorySender:
    """The segments of a learner, in a scratch folder. `CollectiveSender` has the same methods."""

    needs_all = False  # True if all present workers take part in every broadcast, even with the version already loaded

    def __init__(
        self, manifest: Manifest, parent: Path, *, patience_s: float = _PATIENCE_S, look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        """`patience_s`: how long `stage` waits for memory, looking every `look_every_s`."""
        self.missing_bytes = 0  # that the next version waits for
        self._manifest = manifest
        self._patience_s, self._look_every_s = patience_s, look_every_s
        self._scratch = ScratchFolder(parent, "segments")
        self._in_use: list[_Segment] = []
        self._free: list[_Segment] = []
        self._num_made = 0

    async def stage(self, gives_up: Callable[[], bool] = lambda: False) -> Sequence[Tensor]:
        """Return buckets that no worker reads. Wait while the memory is full.

        Raises:
            WeightsError: the memory was still full at the deadline, or when `gives_up` returned True.
        """
        began_s = time.monotonic()
        said_s = began_s - _SAY_EVERY_S
        while not self._free and (full := await self._make()) is not None:
            now_s = time.monotonic()
            if now_s - began_s >= self._patience_s or gives_up():
                raise WeightsError(f"{full}, for {now_s - began_s:.0f} s")
            if now_s - said_s >= _SAY_EVERY_S:
                logger.error("%s; the learner waits %.0f s more", full, self._patience_s - (now_s - began_s))
                said_s = now_s
            await asyncio.sleep(self._look_every_s)
        self._in_use.append(self._free.pop())
        return self._in_use[-1].buckets

    async def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> SharedMemoryOffer:
        """Return the offer to send to these workers."""
        segment = self._of(buckets)
        segment.readers.update(worker_ids)
        return SharedMemoryOffer(str(segment.path))

    async def send(self, buckets: Sequence[Tensor]) -> None:
        """Nothing to do: the workers read the segment themselves."""

    def taken(self, worker_id: str) -> None:
        """Record the success of the last offer to this worker: nothing reads the buckets there any more."""
        for segment in self._in_use:
            segment.readers.discard(worker_id)

    def lost(self, worker_id: str) -> None:
        """Record the loss of a worker: it may still read the buckets of an offer at any later time."""
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

    async def _make(self) -> str | None:
        """Make a free segment; return the error if the memory is full."""
        size = self._manifest.total_bytes
        path = self._scratch.path / f"segment-{self._num_made}"  # a worker may still map the last learner's
        self._num_made += 1
        try:
            await asyncio.to_thread(_reserve, path, size)  # the kernel clears every page
            buckets = _map(path, self._manifest)
        except OSError as error:
            path.unlink(missing_ok=True)
            await asyncio.to_thread(remove_abandoned)
            free = shutil.disk_usage(self._scratch.path).free
            self.missing_bytes = max(1, size - free)
            return (
                f"{self._scratch.path}: a version of the weights needs {size} bytes of shared memory, {free} are free "
                f"({os.strerror(error.errno or 0)}); remove files there, or enlarge the shared memory"
            )
        self.missing_bytes = 0
        self._free.append(_Segment(path, buckets))
        return None


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


def _reserve(path: Path, size: int) -> None:
    """Create a file of this size, with all its memory; raises OSError and leaves no file if the memory is full."""
    if size > shutil.disk_usage(path.parent).free:  # do not fill the memory in vain: other programs use it, too
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path.touch(mode=0o600, exist_ok=False)
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        path.unlink()
        raise


def _map(path: Path, manifest: Manifest) -> list[Tensor]:
    """Map the buckets of a segment, each [num_bytes] uint8."""
    with path.open("r+b") as file:
        flat = torch.frombuffer(mmap.mmap(file.fileno(), manifest.total_bytes), dtype=torch.uint8)
    return list(flat.split(list(manifest.bucket_num_bytes)))
