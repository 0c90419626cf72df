"""How much of the removed padding do packed rows gain, over padded rows?

A train step's forward and backward over 32 log-normal lengths (median 200, sigma 1), with the same model, sequences and
loss. The named alternative is `padded`: the transformers model with transformers' attention and an attention mask, in
microbatches of 8 sequences in the order of arrival, padded to the longest. `packed` is the learner's packing: rows by
first-fit decreasing without padding, as long as a padded microbatch on average. Without padding, the expected gain is
padded tokens / tokens. At the end, the gradients of both must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.head import LogitForm
from areal_rloo.models.loading import PACKED_ATTENTION
from areal_rloo.models.policy import Policy, TokenLogprobs, loss_of_tokens
from areal_rloo.trajectory import Completion, Trajectory
from benchmarks.harness import Benchmark, Case, timed

PADDED_BATCH = 8  # sequences


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(2)
    num, hidden = (8, 64) if quick else (32, 256)
    lengths = np.random.default_rng(0).lognormal(np.log(20 if quick else 200), 1.0, num).astype(int).clip(8, 2048)
    trajectories = [_trajectory(int(length), index) for index, length in enumerate(lengths)]
    batches = [trajectories[i : i + PADDED_BATCH] for i in range(0, num, PADDED_BATCH)]
    padded_tokens = sum(len(batch) * max(t.num_tokens for t in batch) for batch in batches)
    tokens = int(lengths.sum())
    budget = max(int(lengths.max()), padded_tokens // len(batches))
    model = _model(hidden)
    packed_model = copy.deepcopy(model)
    packed_model.set_attn_implementation(PACKED_ATTENTION)
    contestants: dict[str, Callable[[], float]] = {
        "packed": lambda: tokens / timed(partial(_packed, packed_model, trajectories, budget)),
        "padded": lambda: tokens / timed(partial(_padded, model, batches)),
    }
    facts = {"sequences": num, "hidden": hidden, "tokens": tokens, "padded_tokens": padded_tokens}
    rounds = 2 if quick else 5
    yield Case(
        "log_normal", "tokens/s", contestants, [("packed", "padded")], rounds, larger_is_better=True, facts=facts
    )
    both = zip(model.parameters(), packed_model.parameters(), strict=True)
    pairs = [(a.grad, b.grad) for a, b in both if a.grad is not None and b.grad is not None]
    largest = max(float(padded.abs().max()) for padded, _ in pairs)
    assert all(float((a - b).abs().max()) < 1e-5 * largest for a, b in pairs), "both train on the same loss"


def _model(hidden: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    model: PreTrainedModel = Qwen2ForCausalLM(config)
    return model


def _trajectory(length: int, index: int) -> Trajectory:
    """Return `length` tokens with the preceding tokens as input."""
    rng = np.random.default_rng(index)
    tokens = rng.integers(2, 4096, length).astype(np.int32)
    completion = Completion(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), "stop")
    return Trajectory(0, index, np.array([1], np.int32), completion, 0.0)


def _loss(given: TokenLogprobs, part: slice) -> torch.Tensor:
    return given.logprobs.sum() / 1e4


def _padded(model: PreTrainedModel, batches: list[list[Trajectory]]) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        longest = max(len(t.completion.tokens) for t in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        targets, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, trajectory in enumerate(batch):
            num = len(trajectory.completion.tokens)
            tokens = torch.from_numpy(trajectory.completion.tokens).long()
            ids[row, 0], ids[row, 1:num], targets[row, :num], mask[row, :num] = 1, tokens[:-1], tokens, 1
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        real = mask.bool()
        head = model.get_output_embeddings().weight
        loss_of_tokens(hidden[real], head, targets[real], LogitForm(), _loss)[0].backward()


def _packed(model: PreTrainedModel, trajectories: list[Trajectory], budget: int) -> None:
    model.zero_grad(set_to_none=True)
    policy = Policy(model, temperature=1.0, dtype=torch.float32)
    (microbatches,) = pack(trajectories, max_tokens=budget).microbatches
    for microbatch in microbatches:
        row = Row.of(microbatch, torch.device("cpu"))
        policy(row.input_ids, row.layout, row.predicts, row.targets, token_loss=_loss)[0].backward()


BENCHMARK = Benchmark("packing", __doc__, cases)
