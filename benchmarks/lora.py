"""Measure how closely a bfloat16 engine follows a policy with adapters (LoRA): adapters apart, or merged and rounded.

    python -m benchmarks.lora [--output benchmarks/results/lora.json]

A small random Qwen2 whose weights are bfloat16 numbers, as those of most models are. Adapters of rank 16 on all linear
layers change the weights by a share of their size. The embedded engine gets the adapters `apart`, merged weights
rounded to the nearest number (`nearest`), merged weights rounded up or down by chance, so that the mean is exact
(`stochastic`), or the weights without adapters (`none`). The mismatch is the mean |log engine - log learner| of sampled
tokens; the learner computes in bfloat16, too. Without any change the mismatch is that of two programs that round in
other places. `lost` is the metric `lora_lost_share` of the nearest numbers. `kept` is the share of the change of the
logprobs of random texts: with d the change in bfloat16 and D the change in float32, sum(d D) / sum(D D). Then apart and
merged weights decode in turn: the ratio of their speeds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from areal_rloo.config import LoraConfig, load_config
from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.learner.adapters import lost_share, named_weights, rounding
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.folder import ADAPTER_DOWN, ADAPTER_UP
from areal_rloo.models.policy import Policy
from areal_rloo.trajectory import Completion, Trajectory
from benchmarks import hardware
from benchmarks.learning import SEEDS, over_seeds

CPU = torch.device("cpu")
LORA = LoraConfig()
SIZES = (0.0, 1e-4, 1e-3, 1e-2)
STD = 0.1  # of the weights: the policy is neither uniform nor certain
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
Weights = Iterator[tuple[str, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    requests = _requests(arguments.requests, arguments.tokens)
    measured: dict[tuple[str, float], list[float]] = {}
    kept: dict[tuple[str, float], list[float]] = {}
    lost: dict[float, list[float]] = {size: [] for size in SIZES}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(Path(folder), seed)
            before = _adapted(folder, 0.0, seed)
            for size in SIZES:
                causal = _adapted(folder, size, seed)
                lost[size].append(lost_share([rounding(causal, torch.bfloat16)]))
                for way, weights in WAYS.items():
                    mismatch = _mismatch(folder, causal, requests, weights(causal), apart=way == "apart")
                    measured.setdefault((way, size), []).append(mismatch)
                for way, share in _kept(before, causal).items() if size else ():
                    kept.setdefault((way, size), []).append(share)
    table = [
        {
            "size": size,
            "lost": round(statistics.mean(lost[size]), 4) if size else None,
            **over_seeds(**{way: measured[way, size] for way in WAYS}),
            **over_seeds(**{f"kept_{way}": kept[way, size] for way in KEEPING if size}),
        }
        for size in SIZES
    ]
    for row in table:
        print(row, flush=True)
    result = {"seeds": SEEDS, "tokens": arguments.requests * arguments.tokens, "shape": SHAPE, "table": table}
    hardware.write(arguments.output, {**result, "speed_apart_over_merged": _speed_ratio(requests)})


def _apart(causal: PreTrainedModel) -> Weights:
    return named_weights(causal, "adapters")  # the engine has the frozen weights from the model's files


def _nearest(causal: PreTrainedModel) -> Weights:
    return named_weights(causal)


def _stochastic(causal: PreTrainedModel) -> Weights:
    """Round up or down with the probability that makes the mean exact: add noise below the kept 16 bits, and cut."""
    for name, weight in named_weights(causal):
        bits = weight.contiguous().view(torch.int32)
        noisy = bits + torch.randint(0, 2**16, bits.shape, dtype=torch.int32)
        yield name, (noisy & ~0xFFFF).view(torch.float32)


def _none(causal: PreTrainedModel) -> Weights:
    adapters = (ADAPTER_DOWN, ADAPTER_UP)
    return ((name, weight) for name, weight in named_weights(causal, "apart") if not name.endswith(adapters))


WAYS: dict[str, Callable[[PreTrainedModel], Weights]] = {
    "apart": _apart,
    "nearest": _nearest,
    "stochastic": _stochastic,
    "none": _none,
}
KEEPING = ("apart", "nearest", "stochastic")


def _save_model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config.from_dict(
        {"vocab_size": 512, "tie_word_embeddings": False, "initializer_range": STD, **SHAPE, **heads}
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _adapted(folder: str, size: float, seed: int) -> PreTrainedModel:
    """Load the model with adapters that change each weight by about `size` of the weights' standard deviation."""
    config = load_config("quickstart.yaml", ["learner.lora={}", "rollout.engine=sglang", "rollout.device=cpu"])
    causal = build_rank(config, model_path=folder, device=CPU).policy.causal
    torch.manual_seed(1000 + seed)
    scaling = LORA.alpha / LORA.rank
    with torch.no_grad():
        for name, parameter in causal.named_parameters():
            if ".lora_A." in name:
                parameter.normal_()
            elif ".lora_B." in name:
                parameter.normal_(std=size * STD / scaling / LORA.rank**0.5) if size else parameter.zero_()
    return causal


def _requests(num: int, num_tokens: int) -> list[GenerationRequest]:
    random = np.random.default_rng(0)
    sampling = SamplingParameters(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    return [GenerationRequest(str(i), tuple(random.integers(2, 512, 8).tolist()), sampling) for i in range(num)]


def _engine(folder: str, num_slots: int, *, apart: bool) -> EmbeddedEngine:
    lora = LORA if apart else None
    return EmbeddedEngine(
        Path(folder), device=CPU, dtype=torch.bfloat16, num_slots=num_slots, context_tokens=256, lora=lora
    )


def _completions(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[Completion]:
    futures: list[Future[Completion]] = engine.submit(requests)
    return [future.result() for future in futures]


def _mismatch(
    folder: str, causal: PreTrainedModel, requests: list[GenerationRequest], weights: Weights, *, apart: bool
) -> float:
    """Return the mean |log engine - log learner| in nats a token, over completions that the engine samples."""
    engine = _engine(folder, len(requests), apart=apart)
    engine.load_weights(1, weights).result()
    completions = _completions(engine, requests)
    engine.close()
    policy = Policy(causal, temperature=1.0, dtype=torch.bfloat16)
    differences = []
    for one, completion in zip(requests, completions, strict=True):
        prompt = np.array(one.prompt_tokens, dtype=np.int32)
        ((microbatch,),) = pack([Trajectory(0, 0, prompt, completion, 0.0)], max_tokens=4096).microbatches
        with torch.no_grad():
            logprobs, _ = policy(*Row.of(microbatch, CPU).inputs)
        differences.append(np.abs(completion.behaviour_logprobs - logprobs.numpy()))
    return float(np.concatenate(differences).mean())


def _kept(before: PreTrainedModel, causal: PreTrainedModel) -> dict[str, float]:
    """Return the share of the change of logprobs that each way keeps in bfloat16; `before` has adapters that are 0."""
    merged = copy.deepcopy(before)
    exact = _logprobs(causal, torch.float32) - _logprobs(before, torch.float32)
    rounded_before, shares = _logprobs(before, torch.bfloat16), {}
    for way in KEEPING:
        if way != "apart":
            places = {name.replace(".base_layer.", "."): weight.data for name, weight in merged.named_parameters()}
            for name, weight in WAYS[way](causal):
                places[name].copy_(weight.bfloat16())
        change = _logprobs(causal if way == "apart" else merged, torch.bfloat16) - rounded_before
        shares[way] = float((change * exact).sum() / (exact * exact).sum())
    return shares


def _logprobs(causal: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """Compute the logprobs of 288 random texts of 72 tokens."""
    random, nothing = np.random.default_rng(1), np.zeros(64, dtype=np.int32)
    texts = random.integers(2, 512, (288, 72)).astype(np.int32)
    completions = [Completion(text[8:], nothing.astype(np.float32), nothing, "length") for text in texts]
    given = [Trajectory(0, 0, text[:8], made, 0.0) for text, made in zip(texts, completions, strict=True)]
    policy = Policy(causal, temperature=1.0, dtype=dtype)
    with torch.no_grad():
        rows = [row for rows in pack(given, max_tokens=4096).microbatches for row in rows]
        return torch.cat([policy(*Row.of(row, CPU).inputs)[0].double() for row in rows])


def _speed_ratio(requests: list[GenerationRequest], repeats: int = 7) -> dict[str, Any]:
    """Return the median ratio of tokens/s, apart over merged, on one model; both decode in turn."""
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), 0)
        engines = {apart: _engine(folder, len(requests), apart=apart) for apart in (True, False)}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(repeats + 1):
            for apart, engine in engines.items():
                started_s = time.perf_counter()
                _completions(engine, requests)
                if repeat:  # the first is a warm-up
                    seconds[apart].append(time.perf_counter() - started_s)
        for engine in engines.values():
            engine.close()
    ratios = sorted(merged / apart for apart, merged in zip(seconds[True], seconds[False], strict=True))
    measured = {"median": round(statistics.median(ratios), 3), "lowest": round(ratios[0], 3)}
    print(measured)
    return {**measured, "highest": round(ratios[-1], 3), "repeats": repeats}


if __name__ == "__main__":
    main()
