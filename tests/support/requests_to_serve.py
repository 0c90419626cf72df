"""Requests for an embedded engine, and the logprobs of their completions in the learner's forward pass."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from support.model_versions import cached_logprobs
from transformers import PreTrainedModel

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.loading import load_policy
from areal_rloo.models.policy import Policy
from areal_rloo.trajectory import Completion, Trajectory

PROMPT = (7, 12, 33, 40, 9)


@contextmanager
def serving(folder: Path, **options: object) -> Iterator[EmbeddedEngine]:
    """An engine on the CPU, closed afterwards. One thread: tiny products wait for a second one, on a busy CPU long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    given = {"dtype": torch.float32, "num_slots": 8, "context_tokens": 128, **options}
    engine = EmbeddedEngine(folder, device=torch.device("cpu"), **given)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()
        torch.set_num_threads(num_threads)


def request(name: str, *, prompt: tuple[int, ...] = PROMPT, **options: object) -> GenerationRequest:
    outer = {key: options.pop(key) for key in ("min_version", "pinned") if key in options}
    sampling = SamplingParameters(**{"max_new_tokens": 20, "seed": 1, **options})  # type: ignore[arg-type]
    return GenerationRequest(name, prompt, sampling, **outer)  # type: ignore[arg-type]


def results(futures: list[Future[Completion]]) -> list[Completion]:
    return [future.result(timeout=60) for future in futures]


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll the condition, with pauses for the engine."""
    while not condition():
        time.sleep(0.001)


def mixed_requests(num: int, *, vocab_size: int = 258, longest: int = 60, **options: object) -> list[GenerationRequest]:
    """Prompts and completions of many lengths, some prompts twice."""
    random = np.random.default_rng(5)
    prompts = [tuple(random.integers(2, vocab_size, 1 + 7 * (i % 5) + i % 3).tolist()) for i in range(num)]
    return [
        request(str(i), prompt=prompts[i // 2 * 2], seed=i, **{"max_new_tokens": 1 + (i * 23) % longest, **options})
        for i in range(num)
    ]


def learner_logprobs(
    folder: Path | PreTrainedModel,
    requests: list[GenerationRequest],
    completions: list[Completion],
    dtype: torch.dtype = torch.float32,
) -> list[np.ndarray]:
    """Return the logprobs that a train step computes for these completions, at each request's temperature."""
    model = folder if isinstance(folder, PreTrainedModel) else load_policy(str(folder), device=torch.device("cpu"))
    by_request = []
    for one, completion in zip(requests, completions, strict=True):
        trajectory = Trajectory(
            group_id=0,
            sample_index=0,
            prompt_tokens=np.array(one.prompt_tokens, dtype=np.int32),
            completion=completion,
            reward=0.0,
        )
        ((microbatch,),) = pack([trajectory], max_tokens=4096).microbatches
        row = Row.of(microbatch, torch.device("cpu"))
        policy = Policy(model, temperature=one.sampling.temperature, dtype=dtype)
        with torch.no_grad():
            logprobs, _ = policy(row.input_ids, row.layout, row.predicts, row.targets)
        by_request.append(logprobs.numpy())
    return by_request


def logprobs_by_version(
    models: Mapping[int, PreTrainedModel], one: GenerationRequest, completion: Completion
) -> np.ndarray:
    """Return transformers' logprobs, each token with the weights of the token's version."""
    return cached_logprobs(models, one.prompt_tokens, completion, temperature=one.sampling.temperature).numpy()


def assert_agree(completions: list[Completion], expected: list[np.ndarray], tolerance: float) -> None:
    for completion, logprobs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.behaviour_logprobs, logprobs, rtol=0, atol=tolerance)


def assert_same(completions: list[Completion], others: list[Completion], tolerance: float = 1e-5) -> None:
    """Check for the same tokens, versions and reasons, and logprobs within the tolerance."""
    for one, other in zip(completions, others, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.versions.tolist() == other.versions.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, rtol=0, atol=tolerance)
