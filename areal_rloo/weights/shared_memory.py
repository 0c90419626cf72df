"""Weights through shared memory, on a single host: the learner gathers into a file in memory, and workers map the file.

The learner writes a segment again only after every worker with an offer has taken the segment. A segment that a
silent worker may still read is given up: the name is removed, and the memory is freed when the worker unmaps it. So a
worker that wakes up late still reads whole weights.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.weights.manifest import Manifest, SharedMemoryOffer


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    buckets: list[Tensor]
    readers: set[str] = field(default_factory=set)
    in_use: bool = True
    given_up: bool = False


class SharedMemorySender:
    """The segments of a run, in a folder of their own."""

    needs_all = False

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest = manifest
        self._folder = folder
        self._segments: list[_Segment] = []
        self._offered: _Segment | None = None
        self._run = secrets.token_hex(4)  # a worker may still map segments of an earlier learner under their names
        self._num_made = 0
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed learner
        folder.mkdir(parents=True, mode=0o700)

    async def stage(self) -> Sequence[Tensor]:
        segment = next((s for s in self._segments if not s.in_use and not s.readers), None)
        if segment is None:
            segment = self._made()
        segment.in_use = True
        return segment.buckets

    async def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> SharedMemoryOffer:
        segment = self._of(buckets)
        segment.readers |= set(worker_ids)
        self._offered = segment
        return SharedMemoryOffer(str(segment.path))

    async def send(self, buckets: Sequence[Tensor]) -> None:
        """Nothing to do: the workers read the segment themselves."""

    def taken(self, worker_id: str) -> None:
        if self._offered is not None:
            self._offered.readers.discard(worker_id)

    def lost(self, worker_id: str) -> None:
        for segment in list(self._segments):
            if worker_id in segment.readers and not segment.in_use:
                self._give_up(segment)
            segment.given_up |= worker_id in segment.readers

    def release(self, buckets: Sequence[Tensor]) -> None:
        segment = self._of(buckets)
        segment.in_use = False
        if segment.given_up:
            self._give_up(segment)

    def close(self) -> None:
        self._segments.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of(self, buckets: Sequence[Tensor]) -> _Segment:
        return next(segment for segment in self._segments if segment.buckets is buckets)

    def _give_up(self, segment: _Segment) -> None:
        if segment is self._offered:
            self._offered = None  # the last reference keeps the memory mapped
        segment.path.unlink(missing_ok=True)
        if segment in self._segments:
            self._segments.remove(segment)

    def _made(self) -> _Segment:
        size = self._manifest.total_bytes
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise WeightsError(
                f"{self._folder}: a version of the weights needs {size} bytes of shared memory, {free} are free; "
                "enlarge the shared memory or set weights.transport=collective"
            )
        path = self._folder / f"segment-{self._run}-{self._num_made}"
        self._num_made += 1
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, size)
            flat = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        segment = _Segment(path, list(flat.split(list(self._manifest.bucket_num_bytes))))
        self._segments.append(segment)
        return segment


class SharedMemoryReader:
    """Maps offered segments, and keeps a few mapped: segments rotate, and a new mapping costs a page fault per page."""

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}

    def take(self, offer: SharedMemoryOffer, manifest: Manifest) -> Sequence[Tensor]:
        """Map the buckets. Read them only: the learner alone writes.

        Raises:
            WeightsError: the segment is gone because a newer version replaced it.
        """
        flat = self._mapped.pop(offer.path, None)
        if flat is None or len(flat) != manifest.total_bytes:
            try:
                with Path(offer.path).open("r+b") as file:
                    flat = torch.frombuffer(mmap.mmap(file.fileno(), manifest.total_bytes), dtype=torch.uint8)
            except (OSError, ValueError) as error:
                raise WeightsError(f"segment {offer.path} cannot be mapped: {error}") from error
        self._mapped[offer.path] = flat
        while len(self._mapped) > 3:
            del self._mapped[next(iter(self._mapped))]
        return list(flat.split(list(manifest.bucket_num_bytes)))
