"""Measure how the time to publish weights grows with the receivers: 1, 8 and 64 of them on this machine.

    python benchmarks/weights_many.py [--size-mb 32] [--output benchmarks/results/weights_many.json]

Does a version reach 64 receivers in less than 64 times the time of one? `seconds` runs from the offer until every
receiver has readable tensors: mapped for shared memory, in a buffer for the collective (Gloo over loopback). The named
alternative is to send to one receiver after another: `of_one_by_one` is the time over the number of receivers times the
time of a single one. All receivers share the cores of this machine with the sender, so this is the cost of all copies
together; on separate hosts the copies of the receivers run at the same time. `form_s` is the time of the first version,
which also forms the group. Sizes are interleaved, and results are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shutil
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hardware
import torch

from areal_rloo.weights.broadcast import SendTransport
from areal_rloo.weights.collective import CollectiveReader, CollectiveSender
from areal_rloo.weights.manifest import CollectiveOffer, Manifest, build_manifest
from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender

CPU = torch.device("cpu")
NUMBERS = (1, 8, 64)
_NUM_TENSORS = 16
_NUM_PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mb", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    numel = arguments.size_mb * 2**20 // 4 // _NUM_TENSORS
    tensors = [(f"t{index}", torch.zeros(numel)) for index in range(_NUM_TENSORS)]
    manifest = build_manifest(tensors, bucket_bytes=8 * 2**20)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    fleets = {
        (name, number): Fleet(manifest, _sender(name, manifest, folder), number)
        for name in ("shared_memory", "collective")
        for number in NUMBERS
    }
    seconds: dict[tuple[str, int], list[float]] = {case: [fleet.publish()] for case, fleet in fleets.items()}
    for _ in range(arguments.repeats):
        for case, fleet in fleets.items():
            seconds[case].append(fleet.publish())
    for fleet in fleets.values():
        fleet.close()
    shutil.rmtree(folder)
    medians = {case: statistics.median(values[1:]) for case, values in seconds.items()}
    rows: list[dict[str, Any]] = []
    for (name, number), median in medians.items():
        spread = (max(seconds[name, number][1:]) - min(seconds[name, number][1:])) / median
        rows.append(
            {
                "transport": name,
                "receivers": number,
                "seconds": round(median, 4),
                "spread": round(spread, 2),
                "of_one_by_one": round(median / (number * medians[name, 1]), 2),
                "form_s": round(seconds[name, number][0], 3),
            }
        )
        print(rows[-1])
    hardware.write(arguments.output, {"mib": arguments.size_mb, "cases": rows})


def _sender(name: str, manifest: Manifest, folder: Path) -> SendTransport:
    if name == "shared_memory":
        return SharedMemorySender(manifest, folder)
    return CollectiveSender(manifest, host="127.0.0.1", device=CPU, timeout_s=60)


class Fleet:
    """A sender here, and receivers in two other processes."""

    def __init__(self, manifest: Manifest, sender: SendTransport, number: int) -> None:
        self._manifest, self._sender = manifest, sender
        self._names = [f"reader-{index}" for index in range(number)]
        context = multiprocessing.get_context("spawn")
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


if __name__ == "__main__":
    main()
