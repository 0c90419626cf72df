"""GPU check: the embedded engine against `generate`, the limit of the memory, and the logprobs of the learner.

    python -m benchmarks.gpu_engine [--device cpu --small]

Random weights in bfloat16. The speed is that of `generation_shapes.py`. The numbers: completions of the engine, and the
logprobs of the same tokens by the learner's policy. The prefill: a prompt of many chunks, whose attention has a mask.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.loading import load_policy
from areal_rloo.models.policy import Policy
from areal_rloo.models.sizes import Sizes
from areal_rloo.trajectory import Completion, Trajectory
from benchmarks.generation_shapes import Limits, Load, measure
from benchmarks.gpu_part import GIB, Part, run
from benchmarks.peaks import Peak, finish
from benchmarks.shapes import SHAPES, save_random

WORST = 1.25  # distance of the engine to float32, as a multiple of the distance of the learner to float32


def check(part: Part) -> None:
    names, batches, tokens = (["small"], (1, 4), 8) if part.small else (["0.5b", "1.5b"], (1, 64, 256), 64)
    load = Load(part.device, torch.bfloat16, batches, tokens, 1 if part.small else 2)
    limits = Limits.of(part.device, torch.bfloat16)
    part.row(
        "rates of the device",
        bandwidth_gb_per_s=round(limits.bandwidth / 1e9, 1),
        arithmetic_tflop_per_s=round(limits.arithmetic / 1e12, 2),
    )
    for name in names:
        folder = save_random(part.folder / name, SHAPES[name])
        for batch, row in measure(folder, SHAPES[name], load, limits, others=("generate",)).items():
            over, share = row["embedded_over"]["generate"], row["embedded_share_of_bandwidth_limit"]
            part.row(
                "decoding",
                shape=name,
                batch=batch,
                embedded_tokens_per_s=row["tokens_per_s"]["embedded"],
                generate_tokens_per_s=row["tokens_per_s"]["generate"],
                over_generate=over,
                share_of_bandwidth_limit=share,
                share_of_arithmetic_limit=row["embedded_share_of_arithmetic_limit"],
            )
            part.goal(over >= 1, f"{name}, batch {batch}: {over} times the speed of generate, goal 1")
            if part.on_gpu:
                part.goal(share >= 0.3, f"{name}, batch {batch}: {share} of the bandwidth limit, goal 0.3")
        _numbers(part, name, folder)
        _prefill(part, name, folder)


def _numbers(part: Part, name: str, folder: Path) -> None:
    """Compare logprobs with the learner's, for prompts and completions of many lengths."""
    num, longest = (8, 24) if part.small else (256, 256)
    vocabulary, random = SHAPES[name].vocab_size, np.random.default_rng(0)
    prompts = [random.integers(2, vocabulary, 5 + 7 * (index % 64)).astype(np.int32) for index in range(num)]
    requests = [
        GenerationRequest(str(i), tuple(prompt.tolist()), SamplingParameters(max_new_tokens=longest - i % 9, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    with _engine(part, folder, SHAPES[name], slots=num, context=longest + 7 * 64 + 8) as (engine, peak):
        completions = [future.result() for future in engine.submit(requests)]
        held = peak.grown_bytes
    made = [
        Completion(given.tokens, given.behaviour_logprobs, given.versions, given.finish_reason) for given in completions
    ]
    trajectories = [
        Trajectory(0, index, prompt, completion, 0.0)
        for index, (prompt, completion) in enumerate(zip(prompts, made, strict=True))
    ]
    made_by_engine = np.concatenate([completion.behaviour_logprobs for completion in made])
    learner, exact = (_learner(part, folder, trajectories, dtype) for dtype in (torch.bfloat16, torch.float32))
    gaps, of_engine, of_learner = (
        np.abs(one - other) for one, other in ((made_by_engine, learner), (made_by_engine, exact), (learner, exact))
    )
    part.row(
        "logprobs in bfloat16, mean distances",
        shape=name,
        tokens=len(gaps),
        engine_learner=_short(gaps.mean()),
        engine_float32=_short(of_engine.mean()),
        learner_float32=_short(of_learner.mean()),
        largest_engine_learner=_short(gaps.max()),
        held_beyond_weights_and_cache_gib=round(held / GIB, 2),
    )
    worse = of_engine.mean() / of_learner.mean()
    part.check(bool(worse < WORST), f"{name}: the engine is {worse:.2f} times as far from float32 as the learner")


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _learner(part: Part, folder: Path, trajectories: list[Trajectory], dtype: torch.dtype) -> np.ndarray:
    """Return the logprobs of all completions by the learner's policy, in the order of the trajectories."""
    policy = Policy(load_policy(str(folder), device=part.device), temperature=1.0, dtype=dtype)
    packed = pack(trajectories, max_tokens=4096)
    with torch.no_grad():
        rows = [policy(*Row.of(row, part.device).inputs)[0].cpu() for row in packed.microbatches[0]]
    return np.concatenate([logprobs.numpy() for logprobs in packed.unpacked([rows])])


def _prefill(part: Part, name: str, folder: Path) -> None:
    """Time a long prompt alone; later chunks attend to all tokens before, with a mask."""
    length = 300 if part.small else 16_384
    tokens = np.random.default_rng(1).integers(2, SHAPES[name].vocab_size, length)
    with _engine(part, folder, SHAPES[name], slots=1, context=length + 8) as (engine, peak):
        for repeat in range(2):  # the first is a warm-up
            prompt = tuple(np.roll(tokens, repeat).tolist())
            started = time.perf_counter()
            (future,) = engine.submit([GenerationRequest(str(repeat), prompt, SamplingParameters(max_new_tokens=1))])
            future.result()
            seconds = time.perf_counter() - started
        beyond = peak.grown_bytes
    part.row(
        "prefill of a long prompt",
        shape=name,
        prompt_tokens=length,
        tokens_per_s=round(length / seconds),
        held_beyond_weights_and_cache_gib=round(beyond / GIB, 2),
    )
    if part.on_gpu:
        part.goal(
            beyond < 2 * GIB, f"{name}: prefill took {beyond / GIB:.1f} GiB beyond weights and cache, plans have 2"
        )


@contextmanager
def _engine(
    part: Part, folder: Path, sizes: Sizes, *, slots: int, context: int
) -> Iterator[tuple[EmbeddedEngine, Peak]]:
    """Run an engine; the peak counts from the moment when weights and cache are there."""
    engine = EmbeddedEngine(
        folder,
        device=part.device,
        dtype=torch.bfloat16,
        num_slots=slots,
        context_tokens=context,
        options=EmbeddedConfig(cache_tokens=2 * slots * context),
    )
    finish(part.device)
    peak = Peak(part.device)
    peak.restart()
    yield engine, peak
    engine.close()


if __name__ == "__main__":
    run(check)
