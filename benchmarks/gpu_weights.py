"""GPU check: NCCL groups of one rank, and weights of a GPU through shared memory and by collective.

    python -m benchmarks.gpu_weights [--device cpu --small]

A GPU takes part in an NCCL group once, so a single GPU has a group of one rank: NCCL is loaded, a group forms, and a
broadcast ends. Groups form again and again, as if workers joined and left, and must not keep memory. The transports
run between two processes (`weights.py`): the tensors are on the GPU, the buckets in memory of the host.
"""

from __future__ import annotations

import asyncio
import time

import torch

from areal_rloo.models.device import memory_of
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.manifest import build_manifest, gather
from benchmarks import harness, weights
from benchmarks.gpu_part import GIB, Part, run
from benchmarks.peaks import Peak

_NUM_GROUPS = 6


def check(part: Part) -> None:
    _groups(part)
    size_mb, bucket_mb = (16, 4) if part.small else (3072, 256)
    for case in weights.transports(size_mb=size_mb, bucket_mb=bucket_mb, rounds=3, device=part.device):
        rates = {name: round(rate.median, 2) for name, rate in harness.measure(case).measured.items()}
        part.row("weights, GiB per second", **rates)
    if part.on_gpu:
        part.notes.append(
            "One GPU: no NCCL broadcast between two processes ran; the transport named collective is Gloo on the host. "
            "`tests/integration/test_weights_broadcast.py` has the tests of NCCL, for three GPUs."
        )


def _groups(part: Part) -> None:
    """Form groups of one rank, broadcast in each, and look at the memory of the device."""
    backend = "nccl" if part.on_gpu else "gloo"
    tensors = [(f"t{index}", torch.full((2**20,), float(index), device=part.device)) for index in range(8)]
    manifest = build_manifest(tensors, bucket_bytes=2 * 2**22)
    free = []
    peak = Peak(part.device)
    peak.restart()
    for number in range(_NUM_GROUPS):
        sender = CollectiveSender(manifest, host="127.0.0.1", device=part.device, timeout_s=60)
        started = time.perf_counter()
        buckets = asyncio.run(sender.stage())
        gather(manifest, tensors, buckets)
        offer = asyncio.run(sender.offer(buckets, []))
        asyncio.run(sender.send(buckets))
        part.check(offer.backend == backend, f"the group used {offer.backend}, expected {backend}")
        sender.close()
        if part.on_gpu:
            torch.cuda.empty_cache()  # each sender has a stream, and torch keeps memory by stream
        free.append(memory_of(part.device).free_bytes)
        part.row(
            "groups of one rank",
            group=number,
            backend=offer.backend,
            seconds=round(time.perf_counter() - started, 2),
            free_gib=round(free[-1] / GIB, 2),
        )
    if part.on_gpu:
        kept = (free[1] - free[-1]) / (_NUM_GROUPS - 2)  # the first two also load libraries
        part.goal(kept < 2**24, f"each new NCCL group keeps {kept / 2**20:.0f} MiB of the GPU")


if __name__ == "__main__":
    run(check)
