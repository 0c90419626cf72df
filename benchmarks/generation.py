"""Compare the embedded engine with transformers' padded `generate` and continuous batching, alternating in a process.

    python -m benchmarks.generation [--output benchmarks/results/generation.json]

Use the quickstart's model with random weights, 64 requests of 15 prompt tokens, and the same threads. Two loads: equal
lengths, and a long tail (log-normal, median 32, at most 512). `generate_batch` creates a manager for every call, like
transformers' method of this name; `running_manager` reuses a manager. Only requested tokens count: `generate` pads the
batch to the longest request, and tokens beyond a request's length are discarded. Every repeat runs all systems in turn.
Rates are medians over the repeats. Ratios are medians of ratios within a repeat, so drift of the machine's speed
cancels.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig
from transformers.utils import logging

from areal_rloo.config import TinyModelConfig
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.models.tiny import make_tiny_model, save_tiny_model
from benchmarks import hardware

NUM_REQUESTS = 64
PROMPT = tuple(range(10, 25))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    save_tiny_model(make_tiny_model(TinyModelConfig()), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = EmbeddedEngine(
        folder, device=torch.device("cpu"), dtype=torch.float32, num_slots=NUM_REQUESTS, context_tokens=640
    )
    few = EmbeddedEngine(folder, device=torch.device("cpu"), dtype=torch.float32, num_slots=16, context_tokens=640)
    batching = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    manager = _manager(batching)
    tail = np.random.default_rng(0).lognormal(np.log(32), 1.0, NUM_REQUESTS).astype(int).clip(4, 512)
    loads = {"equal_lengths": [64] * NUM_REQUESTS, "long_tail": tail.tolist()}
    systems: dict[str, Callable[[list[int]], None]] = {
        "embedded": lambda lengths: _embedded(engine, lengths),
        "embedded_16_slots": lambda lengths: _embedded(few, lengths),
        "generate": lambda lengths: _generate(model, lengths),
        "generate_batch": lambda lengths: _generate_batch(batching, lengths),
        "running_manager": lambda lengths: _serve(manager, lengths),
    }
    result: dict[str, object] = {"threads": arguments.threads, "num_requests": NUM_REQUESTS}
    for load, lengths in loads.items():
        rates: dict[str, list[float]] = {name: [] for name in systems}
        for repeat in range(arguments.repeats + 1):
            for name, run in systems.items():
                started = time.perf_counter()
                run(lengths)
                if repeat:  # the first is a warm-up
                    rates[name].append(sum(lengths) / (time.perf_counter() - started))
        medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        ratios = {
            f"over_{name}": round(float(np.median(np.divide(rates["embedded"], rates[name]))), 2)
            for name in rates
            if name != "embedded"
        }
        print(load, "tokens/s", medians, "embedded", ratios, flush=True)
        result[load] = {"useful_tokens": sum(lengths), "tokens_per_s": medians, "embedded": ratios}
    manager.stop(block=True)
    engine.close()
    few.close()
    hardware.write(arguments.output, result)


def _embedded(engine: EmbeddedEngine, lengths: list[int]) -> None:
    requests = [
        GenerationRequest(str(index), PROMPT, SamplingParameters(max_new_tokens=length, seed=index))
        for index, length in enumerate(lengths)
    ]
    for future, length in zip(engine.submit(requests), lengths, strict=True):
        assert len(future.result().tokens) == length


def _generate(model: Any, lengths: list[int]) -> None:
    with torch.inference_mode():
        model.generate(
            torch.tensor([PROMPT] * len(lengths)),
            attention_mask=torch.ones(len(lengths), len(PROMPT), dtype=torch.int64),
            do_sample=True,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
        )


def _manager(model: torch.nn.Module) -> ContinuousBatchingManager:
    manager = model.init_continuous_batching(  # type: ignore[operator]
        generation_config=GenerationConfig(do_sample=True, max_new_tokens=512, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True, num_blocks=256, max_batch_tokens=1024
        ),
    )
    assert isinstance(manager, ContinuousBatchingManager), "transformers makes a manager"
    manager.start()
    return manager


def _generate_batch(model: torch.nn.Module, lengths: list[int]) -> None:
    """Do the work of `generate_batch`, with a separate length for each request."""
    manager = _manager(model)
    _serve(manager, lengths)
    manager.stop(block=True)


def _serve(manager: ContinuousBatchingManager, lengths: list[int]) -> None:
    for length in lengths:
        manager.add_request(list(PROMPT), max_new_tokens=length)
    num_tokens, num_left = 0, len(lengths)
    while num_left:
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            num_tokens += len(output.generated_tokens)
            num_left -= 1
    assert num_tokens == sum(lengths), f"expected {sum(lengths)} tokens, got {num_tokens}"


if __name__ == "__main__":
    main()
