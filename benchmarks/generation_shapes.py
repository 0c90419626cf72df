"""Measure tokens per second of the embedded engine on the shapes of real models, relative to the hardware limits.

    python -m benchmarks.generation_shapes [--shapes 0.5b 1.5b] [--batches 1 64 256] [--device cpu]
        [--output benchmarks/results/generation_shapes.json]

Use random weights in the shapes of Qwen2.5 0.5B and 1.5B. Every request has a different prompt of 4 tokens and the same
number of new tokens. The baselines are transformers' `generate` and continuous batching with `generate_batch` (a
manager per call). Only a single system has weights in memory at a time. Each runs a short warm-up, then the median of
the repeats.

The memory limit: a decode step reads all weights once, and the keys and values of every row,

    limit = batch * bandwidth / (weight bytes + batch * mean context * key/value bytes of a token)

with the bandwidth of a plain copy (bytes read and written). The arithmetic limit: two operations per weight and token,
including prompts, at the rate of a square matrix product,

    limit = arithmetic / (2 * weights * (prompt + new tokens) / new tokens)

The same run measures both rates with the same threads. Memory limits small batches, and arithmetic limits large
batches.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.models.sizes import Sizes
from benchmarks import hardware
from benchmarks.peaks import finish
from benchmarks.shapes import SHAPES, save_random

PROMPT_TOKENS = 4
Generate = Callable[[int, int], None]  # takes a batch size and the new tokens of each request
System = Callable[[Path, Sizes, "Load"], AbstractContextManager[Generate]]


@dataclass(frozen=True)
class Load:
    """Equal requests for a system."""

    device: torch.device
    dtype: torch.dtype
    batches: Sequence[int]
    new_tokens: int
    repeats: int


@dataclass(frozen=True)
class Limits:
    """The rates of a device: of a plain copy, bytes read and written, and of a product of square matrices."""

    bandwidth: float  # bytes per second
    arithmetic: float  # operations per second

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Limits:
        return cls(_bandwidth(device), _arithmetic(device, dtype))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = Load(
        torch.device(arguments.device),
        getattr(torch, arguments.dtype),
        arguments.batches,
        arguments.new_tokens,
        arguments.repeats,
    )
    limits = Limits.of(load.device, load.dtype)
    result: dict[str, object] = {
        **{name: getattr(arguments, name) for name in ("device", "dtype", "threads", "new_tokens", "repeats")},
        "bandwidth_gb_per_s": round(limits.bandwidth / 1e9, 1),
        "arithmetic_gflop_per_s": round(limits.arithmetic / 1e9, 1),
    }
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = save_random(Path(name) / shape, SHAPES[shape])
            result[shape] = rows = {}
            for batch, row in measure(folder, SHAPES[shape], load, limits).items():
                rows[f"batch_{batch}"] = row
                print(shape, batch, row, flush=True)
    hardware.write(arguments.output, result)


def measure(
    folder: Path, sizes: Sizes, load: Load, limits: Limits, *, others: Sequence[str] = ("generate", "generate_batch")
) -> dict[int, dict[str, Any]]:
    """Compare the embedded engine with other systems and with the limits; a row for each batch size."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    systems = {"embedded": _embedded, "generate": _generate, "generate_batch": _batching}
    rates = {name: _rates(systems[name], folder, sizes, load) for name in ("embedded", *others)}
    num_weights, width = sizes.num_parameters, load.dtype.itemsize
    rows: dict[int, dict[str, Any]] = {}
    for batch in load.batches:
        context = PROMPT_TOKENS + load.new_tokens / 2
        moved = batch * limits.bandwidth / (width * (num_weights + batch * context * sizes.cache_numbers))
        computed = limits.arithmetic / (2 * num_weights * (1 + PROMPT_TOKENS / load.new_tokens))
        own = rates["embedded"][batch]
        rows[batch] = {
            "tokens_per_s": {name: round(of_batch[batch], 2) for name, of_batch in rates.items()},
            "embedded_over": {name: round(own / rates[name][batch], 2) for name in others},
            "embedded_share_of_bandwidth_limit": round(own / moved, 3),
            "embedded_share_of_arithmetic_limit": round(own / computed, 3),
        }
    return rows


def _rates(make: System, folder: Path, sizes: Sizes, load: Load) -> dict[int, float]:
    """Return tokens per second by batch size. The system exists only during this call."""
    rates = {}
    with make(folder, sizes, load) as generate:
        for batch in load.batches:
            generate(batch, 2)
            seconds = []
            for _ in range(load.repeats):
                started = time.perf_counter()
                generate(batch, load.new_tokens)
                seconds.append(time.perf_counter() - started)
            rates[batch] = batch * load.new_tokens / statistics.median(seconds)
    gc.collect()
    if load.device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


@contextmanager
def _embedded(folder: Path, sizes: Sizes, load: Load) -> Iterator[Generate]:
    slots, context = max(load.batches), PROMPT_TOKENS + load.new_tokens
    engine = EmbeddedEngine(
        folder,
        device=load.device,
        dtype=load.dtype,
        num_slots=slots,
        context_tokens=context,
        options=EmbeddedConfig(cache_tokens=2 * slots * context),  # each request may use a row of the full context
    )

    def generate(batch: int, num_tokens: int) -> None:
        requests = [
            GenerationRequest(str(index), tuple(prompt), SamplingParameters(max_new_tokens=num_tokens, seed=index))
            for index, prompt in enumerate(_prompts(batch, sizes))
        ]
        for future in engine.submit(requests):
            assert len(future.result().tokens) == num_tokens

    yield generate
    engine.close()


@contextmanager
def _generate(folder: Path, sizes: Sizes, load: Load) -> Iterator[Generate]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=load.dtype)
    model.to(load.device).eval()

    def generate(batch: int, num_tokens: int) -> None:
        prompts = torch.tensor(_prompts(batch, sizes), device=load.device)
        with torch.inference_mode():
            made = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert made.shape == (batch, PROMPT_TOKENS + num_tokens)

    yield generate


@contextmanager
def _batching(folder: Path, sizes: Sizes, load: Load) -> Iterator[Generate]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=load.dtype)
    model.to(load.device).eval()

    def generate(batch: int, num_tokens: int) -> None:
        made = model.generate_batch(
            _prompts(batch, sizes),
            generation_config=GenerationConfig(
                do_sample=True, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True, num_blocks=2 * max(load.batches), max_batch_tokens=1024
            ),
            progress_bar=False,
        )
        assert sum(len(output.generated_tokens) for output in made.values()) == batch * num_tokens

    yield generate


def _prompts(batch: int, sizes: Sizes) -> list[list[int]]:
    return [
        [(7919 * index + 31 * place) % sizes.vocab_size for place in range(PROMPT_TOKENS)] for index in range(batch)
    ]


def _bandwidth(device: torch.device) -> float:
    """Return the bytes per second read and written by a copy of 512 MiB, best of several."""
    source = torch.ones(2**27, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / _least_seconds(lambda: copy.copy_(source), device)


def _arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a product of two square matrices, best of several."""
    size = 8192 if device.type == "cuda" else 2048
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _least_seconds(lambda: torch.mm(matrix, matrix), device)


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        run()
        finish(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
