"""Does a version of the weights reach 64 receivers in less than 64 times the time of one?

The time runs from the offer until every receiver has readable tensors: mapped for shared memory, in a buffer for the
collective (Gloo over loopback). The named alternative is one receiver: a ratio below the number of receivers is better
than one after another. All receivers share the cores of this machine with the sender, so this is the cost of all copies
together; on separate hosts the copies of the receivers run at the same time. `form_s` is the time of the first version,
which also forms the group.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Generator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from areal_rloo.weights.broadcast import SendTransport
from areal_rloo.weights.collective import CollectiveReader, CollectiveSender
from areal_rloo.weights.manifest import CollectiveOffer, Manifest, build_manifest
from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender
from benchmarks.harness import Benchmark, Case, forking_from

CPU = torch.device("cpu")
NUMBERS = (1, 8, 64)
_NUM_TENSORS = 16
_NUM_PROCESSES = 2


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(1)
    numbers, size_mb, rounds = ((1, 2), 2, 2) if quick else (NUMBERS, 32, 9)
    tensors = [(f"t{index}", torch.zeros(size_mb * 2**20 // 4 // _NUM_TENSORS)) for index in range(_NUM_TENSORS)]
    manifest = build_manifest(tensors, bucket_bytes=8 * 2**20)
    for name in ("shared_memory", "collective"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            senders = {number: _sender(name, manifest, Path(folder)) for number in numbers}
            fleets = {f"to_{number}": Fleet(manifest, sender, number) for number, sender in senders.items()}
            facts: dict[str, Any] = {"mib": size_mb}
            facts["form_s"] = {to: round(fleet.publish(), 3) for to, fleet in fleets.items()}
            first, *others = fleets
            contestants = {
                to: partial(fleet.seconds, 1 if name == "collective" else 20) for to, fleet in fleets.items()
            }
            yield Case(name, "s", contestants, [(to, first) for to in others], rounds, facts=facts)
            for fleet in fleets.values():
                fleet.close()


def _sender(name: str, manifest: Manifest, folder: Path) -> SendTransport:
    if name == "shared_memory":
        return SharedMemorySender(manifest, folder)
    return CollectiveSender(manifest, host="127.0.0.1", device=CPU, timeout_s=60)


class Fleet:
    """A sender here, and receivers in two other processes."""

    def __init__(self, manifest: Manifest, sender: SendTransport, number: int) -> None:
        self._manifest, self._sender = manifest, sender
        self._names = [f"reader-{index}" for index in range(number)]
        context = forking_from("benchmarks.weights_many")
        self._pipes: list[Connection] = []
        for index in range(min(number, _NUM_PROCESSES)):
            here, there = context.Pipe()
            context.Process(target=_receive, args=(there, self._names[index::_NUM_PROCESSES]), daemon=True).start()
            self._pipes.append(here)
            assert here.recv() == "ready", "the receivers start with a word"

    def publish(self) -> float:
        """Send a version to all receivers; return the seconds."""

        async def sent() -> None:
            offer = await self._sender.offer(buckets, self._names)
            for pipe in self._pipes:
                pipe.send((self._manifest, offer))
            await self._sender.send(buckets)
            for pipe in self._pipes:
                await asyncio.to_thread(pipe.recv)

        buckets = asyncio.run(self._sender.stage())
        started_s = time.perf_counter()
        asyncio.run(sent())
        seconds = time.perf_counter() - started_s
        for name in self._names:
            self._sender.taken(name)
        self._sender.release(buckets)
        return seconds

    def seconds(self, number: int) -> float:
        """Send so many versions, one after the other; return the mean time."""
        return sum(self.publish() for _ in range(number)) / number

    def close(self) -> None:
        """End the receivers."""
        for pipe in self._pipes:
            pipe.send(None)
        self._sender.close()


def _receive(pipe: Connection, names: list[str]) -> None:
    torch.set_num_threads(1)
    collective = [CollectiveReader(name, CPU) for name in names]
    mapped = [SharedMemoryReader() for _ in names]
    pipe.send("ready")

    async def take(manifest: Manifest, offer: Any) -> None:
        if isinstance(offer, CollectiveOffer):
            await asyncio.gather(*(reader.take(offer, manifest) for reader in collective))
        else:
            await asyncio.gather(*(asyncio.to_thread(reader.take, offer, manifest) for reader in mapped))

    while (message := pipe.recv()) is not None:
        asyncio.run(take(*message))
        pipe.send("taken")


BENCHMARK = Benchmark("weights_many", __doc__, cases)
