"""How much faster is the embedded engine than transformers' `generate` and continuous batching?

The quickstart's model with random weights, 64 requests of 15 prompt tokens, a single thread. Two loads: equal lengths,
and a long tail (log-normal, median 32, at most 512). The named alternatives: `generate`, which pads the batch to the
longest request, `generate_batch`, which creates a manager for every call like transformers' method of this name, and
`running_manager`, which reuses a manager. Only requested tokens count.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Generator
from functools import partial
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
from benchmarks.harness import Benchmark, Case, timed

CPU = torch.device("cpu")
PROMPT = tuple(range(10, 25))


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    num_requests = 8 if quick else 64
    rng = np.random.default_rng(0)
    tail = rng.lognormal(np.log(8 if quick else 32), 1.0, num_requests).astype(int).clip(4, 512).tolist()
    loads = {"equal_lengths": [8 if quick else 64] * num_requests, "long_tail": tail}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(make_tiny_model(TinyModelConfig()), folder)
        model, batching = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
        engine, few = (
            EmbeddedEngine(folder, device=CPU, dtype=torch.float32, num_slots=num, context_tokens=640)
            for num in (num_requests, num_requests // 4)
        )
    manager = _manager(batching)
    systems: dict[str, Callable[[list[int]], None]] = {
        "embedded": partial(_embedded, engine),
        "embedded_quarter_slots": partial(_embedded, few),
        "generate": partial(_generate, model),
        "generate_batch": partial(_generate_batch, batching),
        "running_manager": partial(_serve, manager),
    }
    ratios = [("embedded", name) for name in systems if name != "embedded"]
    try:
        for load, lengths in loads.items():
            contestants = {name: partial(_rate, run, lengths) for name, run in systems.items()}
            facts = {"requests": num_requests, "useful_tokens": sum(lengths)}
            rounds = 2 if quick else 6
            yield Case(load, "tokens/s", contestants, ratios, rounds, larger_is_better=True, facts=facts)
    finally:  # threads, which would keep the process
        manager.stop(block=True)
        engine.close()
        few.close()


def _rate(run: Callable[[list[int]], None], lengths: list[int]) -> float:
    return sum(lengths) / timed(partial(run, lengths))


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


BENCHMARK = Benchmark("generation", __doc__, cases)
