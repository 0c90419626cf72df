"""How near are the transports of weights between two processes to memcpy, and to a single flat Gloo broadcast?

The model has 133 float32 tensors. The time of a transport runs from `stage` and the gather until the receiver has
readable tensors: mapped for shared memory, in the second buffer for the collective. The named alternatives: `memcpy`
copies the tensors within a process, and `gloo_flat` sends them as a single bucket. `swap` is the copy into the engine's
tensors; decoding pauses only for this copy. `checksum` is apart, because it is equal for every transport.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Generator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from areal_rloo.weights.broadcast import SendTransport
from areal_rloo.weights.collective import CollectiveReader, CollectiveSender
from areal_rloo.weights.manifest import Manifest, SharedMemoryOffer, build_manifest, checksum, gather, views
from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender
from benchmarks.harness import Benchmark, Case, forking_from, timed
from benchmarks.peaks import finish

NUM_TENSORS = 133
RATIOS = (("shared_memory", "memcpy"), ("collective", "memcpy"), ("collective", "gloo_flat"), ("swap", "memcpy"))
CPU = torch.device("cpu")


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(1)
    size_mb, bucket_mb, rounds = (8, 1, 2) if quick else (512, 64, 9)
    yield from transports(size_mb=size_mb, bucket_mb=bucket_mb, rounds=rounds, device=CPU)


def transports(*, size_mb: int, bucket_mb: int, rounds: int, device: torch.device) -> Generator[Case]:
    """Yield a case with each transport between two processes; the tensors of both are on the device."""
    numel = size_mb * 2**20 // 4 // NUM_TENSORS
    tensors = [(f"t{index}", torch.full((numel,), float(index), device=device)) for index in range(NUM_TENSORS)]
    target = [tensor.clone() for _, tensor in tensors]
    manifest = build_manifest(tensors, bucket_bytes=bucket_mb * 2**20)
    flat = build_manifest(tensors, bucket_bytes=2**62)
    gib = manifest.total_bytes / 2**30
    context = forking_from("benchmarks.weights")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        senders: dict[str, tuple[Manifest, SendTransport]] = {
            "shared_memory": (manifest, SharedMemorySender(manifest, Path(folder))),
            "collective": (manifest, CollectiveSender(manifest, host="127.0.0.1", device=CPU, timeout_s=60)),
            "gloo_flat": (flat, CollectiveSender(flat, host="127.0.0.1", device=CPU, timeout_s=60)),
        }
        pipes: dict[str, Connection] = {}
        for name in senders:
            pipes[name], there = context.Pipe()
            context.Process(target=_receive, args=(there, str(device)), daemon=True).start()
            assert pipes[name].recv() == "ready", "the receiver starts with a word"
        contestants: dict[str, Callable[[], float]] = {
            name: partial(_rate, gib, partial(_transfer, layout, sender, tensors, pipes[name]))
            for name, (layout, sender) in senders.items()
        }
        contestants["memcpy"] = partial(_rate, gib, partial(_copy, target, [tensor for _, tensor in tensors]))
        for name in ("swap", "checksum"):  # of the newest buckets there, which the warm-up brings first
            contestants[name] = partial(_there, gib, name, pipes["shared_memory"])
        facts = {"gib": round(gib, 3), "tensors": NUM_TENSORS}
        yield Case("transports", "GiB/s", contestants, RATIOS, rounds, larger_is_better=True, facts=facts)
        for pipe in pipes.values():
            pipe.send(None)


def _rate(gib: float, work: Callable[[], object]) -> float:
    return gib / timed(work)


def _there(gib: float, name: str, pipe: Connection) -> float:
    pipe.send(name)
    return gib / float(pipe.recv())


def _transfer(
    manifest: Manifest, sender: SendTransport, tensors: list[tuple[str, torch.Tensor]], pipe: Connection
) -> None:
    buckets = asyncio.run(sender.stage())
    gather(manifest, tensors, buckets)
    pipe.send((manifest, asyncio.run(sender.offer(buckets, ["reader"]))))
    asyncio.run(sender.send(buckets))
    assert pipe.recv() == "taken", "the receiver says when it holds everything"
    sender.taken("reader")
    sender.release(buckets)


def _receive(pipe: Connection, device: str) -> None:
    torch.set_num_threads(1)
    mapped, collective = SharedMemoryReader(), CollectiveReader("reader", CPU)
    buckets: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        if message == "swap":
            pipe.send(timed(partial(_copy, own, given)))
        elif message == "checksum":
            pipe.send(timed(partial(checksum, buckets)))
        else:
            manifest, offer = message
            if isinstance(offer, SharedMemoryOffer):
                buckets = list(mapped.take(offer, manifest))
            else:
                buckets = list(asyncio.run(collective.take(offer, manifest)))
            pipe.send("taken")
            given = [tensor for _, tensor in views(manifest, buckets)]
            own = own or [tensor.to(device, copy=True) for tensor in given]


def _copy(to: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    for place, tensor in zip(to, given, strict=True):
        place.copy_(tensor)
    finish(to[0].device)


BENCHMARK = Benchmark("weights", __doc__, cases)
