"""Compare packed rows with padded rows: a train step's forward and backward over log-normal lengths.

    python -m benchmarks.packing [--sequences 64] [--median 200] [--sigma 1.0] [--device cpu]
        [--output benchmarks/results/packing.json]

Use the same model, sequences and loss for both, alternating. `padded` is the transformers model with transformers'
attention and an attention mask. A microbatch has `--padded-batch` sequences in the order of arrival, padded to the
longest. `packed` is the learner's packing: rows by first-fit decreasing without padding. The budget of a row is the
mean number of tokens in a padded microbatch. Without padding, the expected gain is padded tokens / tokens. `kept` is
the measured ratio of tokens per second divided by this expected gain.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.head import LogitForm
from areal_rloo.models.loading import PACKED_ATTENTION
from areal_rloo.models.policy import Policy, TokenLogprobs, loss_of_tokens
from areal_rloo.trajectory import Completion, Trajectory
from benchmarks import hardware


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--median", type=int, default=200)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--padded-batch", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(0)
    draws = rng.lognormal(np.log(arguments.median), arguments.sigma, arguments.sequences)
    lengths = draws.astype(int).clip(8, arguments.longest).tolist()
    trajectories = [_trajectory(length, index) for index, length in enumerate(lengths)]
    batches = [trajectories[i : i + arguments.padded_batch] for i in range(0, len(lengths), arguments.padded_batch)]
    padded_tokens = [len(batch) * max(t.num_tokens for t in batch) for batch in batches]
    budget = max(*lengths, sum(padded_tokens) // len(batches))
    model = _model(arguments)
    packed_model = copy.deepcopy(model)
    packed_model.set_attn_implementation(PACKED_ATTENTION)
    dtype = torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32
    systems: dict[str, Callable[[], None]] = {
        "padded": lambda: _padded(model, batches, arguments.device, dtype),
        "packed": lambda: _packed(packed_model, trajectories, budget, arguments.device, dtype),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for repeat in range(arguments.repeats + 1):
        for name, run in systems.items():
            started = time.perf_counter()
            run()
            if repeat:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)
    both = zip(model.parameters(), packed_model.parameters(), strict=True)
    pairs = [(a.grad, b.grad) for a, b in both if a.grad is not None and b.grad is not None]
    scale = max(float(a.abs().max()) for a, _ in pairs)
    difference = max(float((a - b).abs().max()) for a, b in pairs) / scale
    promised = sum(padded_tokens) / sum(lengths)
    faster = statistics.median(a / b for a, b in zip(seconds["padded"], seconds["packed"], strict=True))
    result = {
        **{name: getattr(arguments, name) for name in ("sequences", "median", "sigma", "hidden", "layers")},
        **{name: getattr(arguments, name) for name in ("device", "dtype", "threads")},
        "tokens": sum(lengths),
        "padded_tokens": sum(padded_tokens),
        "tokens_per_s": {name: round(sum(lengths) / statistics.median(times), 1) for name, times in seconds.items()},
        "promised": round(promised, 3),
        "faster": round(faster, 3),
        "kept": round(faster / promised, 3),
        "largest_difference_of_gradients": difference,
    }
    print(result, flush=True)
    hardware.write(arguments.output, result)


def _model(arguments: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 256),
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    model: PreTrainedModel = Qwen2ForCausalLM(config).to(arguments.device)
    return model


def _trajectory(length: int, index: int) -> Trajectory:
    """Return `length` tokens with the preceding tokens as input."""
    rng = np.random.default_rng(index)
    tokens = rng.integers(2, 4096, length).astype(np.int32)
    completion = Completion(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), "stop")
    return Trajectory(0, index, np.array([1], np.int32), completion, 0.0)


def _loss(given: TokenLogprobs, part: slice) -> torch.Tensor:
    return given.logprobs.sum() / 1e4


def _padded(model: PreTrainedModel, batches: list[list[Trajectory]], device: str, dtype: torch.dtype) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        longest = max(len(t.completion.tokens) for t in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        targets, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, trajectory in enumerate(batch):
            num = len(trajectory.completion.tokens)
            tokens = torch.from_numpy(trajectory.completion.tokens).long()
            ids[row, 0], ids[row, 1:num], targets[row, :num], mask[row, :num] = 1, tokens[:-1], tokens, 1
        ids, targets, mask = ids.to(device), targets.to(device), mask.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        real = mask.bool()
        head = model.get_output_embeddings().weight
        loss_of_tokens(hidden[real].to(dtype), head, targets[real], LogitForm(), _loss)[0].backward()
    if device == "cuda":
        torch.cuda.synchronize()


def _packed(
    model: PreTrainedModel, trajectories: list[Trajectory], budget: int, device: str, dtype: torch.dtype
) -> None:
    model.zero_grad(set_to_none=True)
    policy = Policy(model, temperature=1.0, dtype=dtype)
    (microbatches,) = pack(trajectories, max_tokens=budget).microbatches
    for microbatch in microbatches:
        row = Row.of(microbatch, torch.device(device))
        policy(row.input_ids, row.layout, row.predicts, row.targets, token_loss=_loss)[0].backward()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
