"""Measure tokens per second of the embedded engine on the shapes of real models, relative to the hardware limits.

    python benchmarks/generation_shapes.py [--shapes 0.5b 1.5b] [--batches 1 64 256] [--device cpu]
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hardware
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen2Config
from transformers.utils import logging

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine

SHAPES = {  # of Qwen2.5: hidden size, intermediate size, layers, heads, key/value heads
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
}
VOCABULARY = 151_936
PROMPT_TOKENS = 4
Generate = Callable[[int, int], None]  # takes a batch size and the new tokens of each request


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    bandwidth, arithmetic = _bandwidth(device), _arithmetic(device, dtype)
    result: dict[str, object] = {
        **{name: getattr(arguments, name) for name in ("device", "dtype", "threads", "new_tokens", "repeats")},
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "arithmetic_gflop_per_s": round(arithmetic / 1e9, 1),
    }
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = _config(shape)
            num_weights = _save(config, folder, dtype)
            rates = {
                name: _rates(make, folder, device, dtype, arguments)
                for name, make in (("embedded", _embedded), ("generate", _generate), ("generate_batch", _batching))
            }
        head_dim = config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * int(config.num_key_value_heads or 0) * head_dim * dtype.itemsize
        result[shape] = rows = {}
        for batch in arguments.batches:
            context = PROMPT_TOKENS + arguments.new_tokens / 2
            moved = batch * bandwidth / (num_weights * dtype.itemsize + batch * context * token_bytes)
            computed = arithmetic / (2 * num_weights * (1 + PROMPT_TOKENS / arguments.new_tokens))
            measured = {name: rates[name][batch] for name in rates}
            rows[f"batch_{batch}"] = row = {
                "tokens_per_s": {name: round(rate, 2) for name, rate in measured.items()},
                "embedded_over": {n: round(measured["embedded"] / measured[n], 2) for n in rates if n != "embedded"},
                "embedded_share_of_bandwidth_limit": round(measured["embedded"] / moved, 3),
                "embedded_share_of_arithmetic_limit": round(measured["embedded"] / computed, 3),
            }
            print(shape, batch, row, flush=True)
    hardware.write(arguments.output, result)


def _rates(
    make: Callable[..., object], folder: Path, device: torch.device, dtype: torch.dtype, arguments: argparse.Namespace
) -> dict[int, float]:
    """Return tokens per second by batch size. The system exists only during this call."""
    rates = {}
    with make(folder, device, dtype, max(arguments.batches), arguments.new_tokens) as generate:  # type: ignore[attr-defined]
        for batch in arguments.batches:
            generate(batch, 2)
            seconds = []
            for _ in range(arguments.repeats):
                started = time.perf_counter()
                generate(batch, arguments.new_tokens)
                seconds.append(time.perf_counter() - started)
            rates[batch] = batch * arguments.new_tokens / statistics.median(seconds)
    gc.collect()
    return rates


@contextmanager
def _embedded(
    folder: Path, device: torch.device, dtype: torch.dtype, slots: int, new_tokens: int
) -> Iterator[Generate]:
    context = PROMPT_TOKENS + new_tokens
    engine = EmbeddedEngine(
        folder,
        device=device,
        dtype=dtype,
        num_slots=slots,
        context_tokens=context,
        options=EmbeddedConfig(cache_tokens=2 * slots * context),  # each request may use a row of the full context
    )

    def generate(batch: int, num_tokens: int) -> None:
        requests = [
            GenerationRequest(str(index), tuple(prompt), SamplingParameters(max_new_tokens=num_tokens, seed=index))
            for index, prompt in enumerate(_prompts(batch))
        ]
        for future in engine.submit(requests):
            assert len(future.result().tokens) == num_tokens

    yield generate
    engine.close()


@contextmanager
def _generate(
    folder: Path, device: torch.device, dtype: torch.dtype, slots: int, new_tokens: int
) -> Iterator[Generate]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device).eval()

    def generate(batch: int, num_tokens: int) -> None:
        prompts = torch.tensor(_prompts(batch), device=device)
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
def _batching(
    folder: Path, device: torch.device, dtype: torch.dtype, slots: int, new_tokens: int
) -> Iterator[Generate]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device).eval()

    def generate(batch: int, num_tokens: int) -> None:
        made = model.generate_batch(
            _prompts(batch),
            generation_config=GenerationConfig(
                do_sample=True, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True, num_blocks=2 * slots, max_batch_tokens=1024
            ),
            progress_bar=False,
        )
        assert sum(len(output.generated_tokens) for output in made.values()) == batch * num_tokens

    yield generate


def _prompts(batch: int) -> list[list[int]]:
    return [[(7919 * index + 31 * place) % VOCABULARY for place in range(PROMPT_TOKENS)] for index in range(batch)]


def _config(shape: str) -> Qwen2Config:
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )


def _save(config: Qwen2Config, folder: Path, dtype: torch.dtype) -> int:
    """Write random weights in the shape's format and return the number of parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
