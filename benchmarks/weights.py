"""Measure GiB/s of each weight transport between two processes, against memcpy and a single flat Gloo broadcast.

    python -m benchmarks.weights [--size-mb 512] [--sglang .venv-sglang/bin/python]
        [--output benchmarks/results/weights.json]

The model has 133 float32 tensors. The time runs from `publish` (the gather) until the receiver has readable tensors:
mapped for shared memory, in the second buffer for the collective. The checksums of both ends are reported separately,
because they are equal for every transport. `swap` is the copy into the engine's tensors; decoding pauses only for this
copy. Repeats are interleaved, and results are medians. With a Python that has SGLang, `sglang_pause.py` adds the cost
of an update there.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from areal_rloo.weights.broadcast import SendTransport
from areal_rloo.weights.collective import CollectiveReader, CollectiveSender
from areal_rloo.weights.manifest import Manifest, SharedMemoryOffer, build_manifest, checksum, gather, views
from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender
from benchmarks import hardware, sglang_pause
from benchmarks.peaks import finish

GIB = 2**30
NUM_TENSORS = 133
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-mb", type=int, default=512)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sglang", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--sglang-updates", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="of the tensors; the buckets are in memory of the host")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    rates = measure(size_mb=arguments.size_mb, bucket_mb=arguments.bucket_mb, repeats=arguments.repeats, device=device)
    ratios = {
        "shared_memory_of_memcpy": round(rates["shared_memory"] / rates["memcpy"], 2),
        "collective_of_memcpy": round(rates["collective"] / rates["memcpy"], 2),
        "collective_of_flat_gloo": round(rates["collective"] / rates["gloo_flat"], 2),
    }
    size = arguments.size_mb / 1024
    print(f"{size:.2f} GiB in {NUM_TENSORS} tensors, GiB/s:", rates, ratios)
    sglang = {}
    if arguments.sglang.exists():
        sglang = {"sglang": sglang_pause.measure(str(arguments.sglang), num_updates=arguments.sglang_updates)}
    else:
        print(f"no SGLang at {arguments.sglang}; `make sglang` sets one up")
    hardware.write(arguments.output, {"gib": round(size, 3), "gib_per_s": rates, **ratios, **sglang})


def measure(*, size_mb: int, bucket_mb: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Return GiB per second of each transport between two processes; the tensors of both are on the device."""
    numel = size_mb * 2**20 // 4 // NUM_TENSORS
    tensors = [(f"t{index}", torch.full((numel,), float(index), device=device)) for index in range(NUM_TENSORS)]
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    manifest = build_manifest(tensors, bucket_bytes=bucket_mb * 2**20)
    flat = build_manifest(tensors, bucket_bytes=2**62)
    senders: dict[str, tuple[Manifest, SendTransport]] = {
        "shared_memory": (manifest, SharedMemorySender(manifest, folder)),
        "collective": (manifest, CollectiveSender(manifest, host="127.0.0.1", device=CPU, timeout_s=60)),
        "gloo_flat": (flat, CollectiveSender(flat, host="127.0.0.1", device=CPU, timeout_s=60)),
    }
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name in senders:
        pipes[name], there = context.Pipe()
        processes.append(context.Process(target=_receive, args=(there, str(device)), daemon=True))
        processes[-1].start()
        assert pipes[name].recv() == "ready", "the receiver starts with a word"
    target = [tensor.clone() for _, tensor in tensors]
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *senders, "swap", "checksum")}
    for repeat in range(repeats + 2):
        row = {"memcpy": _timed(partial(_copy, target, [tensor for _, tensor in tensors]))}
        for name, (layout, sender) in senders.items():
            row[name], row["swap"], row["checksum"] = _transfer(layout, sender, tensors, pipes[name])
        if repeat >= 2:  # the first two create segments and groups
            for name, value in row.items():
                seconds[name].append(value)
    for pipe in pipes.values():
        pipe.send(None)
    shutil.rmtree(folder)
    size = manifest.total_bytes / GIB
    return {name: round(size / statistics.median(values), 2) for name, values in seconds.items()}


def _transfer(
    manifest: Manifest, sender: SendTransport, tensors: list[tuple[str, torch.Tensor]], pipe: Connection
) -> tuple[float, float, float]:
    """Return the seconds of the transfer, of the receiver's swap and of the receiver's checksum."""
    started = time.perf_counter()
    buckets = asyncio.run(sender.stage())
    gather(manifest, tensors, buckets)
    pipe.send((manifest, asyncio.run(sender.offer(buckets, ["reader"]))))
    asyncio.run(sender.send(buckets))
    assert pipe.recv() == "taken", "the receiver says when it holds everything"
    seconds = time.perf_counter() - started
    swap, total = pipe.recv()
    sender.taken("reader")
    sender.release(buckets)
    return seconds, swap, total


def _receive(pipe: Connection, device: str) -> None:
    torch.set_num_threads(1)
    mapped, collective = SharedMemoryReader(), CollectiveReader("reader", CPU)
    own: list[torch.Tensor] = []
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        manifest, offer = message
        if isinstance(offer, SharedMemoryOffer):
            buckets = mapped.take(offer, manifest)
        else:
            buckets = asyncio.run(collective.take(offer, manifest))
        pipe.send("taken")
        given = [tensor for _, tensor in views(manifest, buckets)]
        own = own or [tensor.to(device, copy=True) for tensor in given]
        swap = _timed(partial(_copy, own, given))
        pipe.send((swap, _timed(partial(checksum, buckets))))


def _copy(to: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    for place, tensor in zip(to, given, strict=True):
        place.copy_(tensor)
    finish(to[0].device)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
