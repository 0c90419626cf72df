"""The short supervised start of the built-in tiny model, on noisy demonstrations.

It ends by accuracy, not after a number of steps: accuracy rises so steeply that a count would land elsewhere on every
machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from areal_rloo.config import SourceConfig, WarmStartConfig
from areal_rloo.learner.packing import plan_rows
from areal_rloo.models.attention import PACKED_ATTENTION
from areal_rloo.models.layout import PackedLayout
from areal_rloo.models.policy import packed_logits
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.tasks.arithmetic import ArithmeticTask, demonstration
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_CHECK_EVERY = 20
_HOPEFUL_LOSS = 0.25  # above it hardly any completion is right, and looking costs as much as a step
_NUM_VALIDATION = 200
_ROW_TOKENS = 8192


def train_on_demonstrations(model: PreTrainedModel, config: WarmStartConfig, *, seed: int) -> float:
    """AdamW on noisy demonstrations; leaves the model right only sometimes, and gives its greedy accuracy.

    It trains until greedy decoding was right `until_accuracy` of the time, so that the skill is nearly there, and goes
    back to the last weights that were right at most `keep_accuracy`.
    """
    tokenizer = make_tiny_tokenizer()
    task = ArithmeticTask(SourceConfig(), seed)
    items, rng = task.items("train"), random.Random(seed)
    validation = [
        _encoded(tokenizer, item.text, demonstration(item, rng, error_rate=0.0))
        for item in task.validation_items()[:_NUM_VALIDATION]
    ]
    model.set_attn_implementation(PACKED_ATTENTION)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    kept, accuracy = _Kept(0, 0.0, _copied(model)), 0.0
    for step in range(1, config.max_steps + 1):
        chosen = [items[rng.randrange(len(items))] for _ in range(config.batch_size)]
        texts = [(item.text, demonstration(item, rng, error_rate=config.error_rate)) for item in chosen]
        loss = _step(model, optimizer, [_encoded(tokenizer, prompt, text) for prompt, text in texts])
        if step % 200 == 0:
            logger.info("warm start: step %d, loss %.3f, greedy accuracy %.2f", step, loss, accuracy)
        if step % _CHECK_EVERY == 0 and loss < _HOPEFUL_LOSS:
            accuracy = greedy_accuracy(model, validation)
            if accuracy <= config.keep_accuracy:
                kept = _Kept(step, accuracy, _copied(model))
            if accuracy >= config.until_accuracy:
                break
    else:
        logger.warning("warm start: greedy accuracy %.2f after %d steps; going on with it", accuracy, config.max_steps)
    model.load_state_dict(kept.weights)
    logger.info("warm start: the weights of step %d are kept, greedy accuracy %.2f", kept.step, kept.accuracy)
    return kept.accuracy


@dataclass(frozen=True, slots=True)
class _Kept:
    """Weights to go back to."""

    step: int
    accuracy: float
    weights: dict[str, Tensor]


def _copied(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _step(
    model: PreTrainedModel, optimizer: torch.optim.AdamW, sequences: Sequence[tuple[list[int], list[int]]]
) -> float:
    logits, targets, _ = _forward(model, sequences)
    loss = torch.nn.functional.cross_entropy(logits, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


@torch.no_grad()
def greedy_accuracy(model: PreTrainedModel, sequences: Sequence[tuple[list[int], list[int]]]) -> float:
    """How often greedy decoding would give exactly these completions.

    It would if and only if the most likely token is the right one at every place when the right ones came before it, so
    one forward pass tells what decoding token by token would.
    """
    num_right = 0
    (rows,) = plan_rows([len(p) + len(c) - 1 for p, c in sequences], _ROW_TOKENS)
    for row in rows:
        logits, targets, sequence = _forward(model, [sequences[index] for index in row])
        wrong = sequence[logits.argmax(-1) != targets]
        num_right += len(row) - len(wrong.unique())
    return num_right / len(sequences)


def _forward(model: PreTrainedModel, sequences: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits at the completion tokens, those tokens, and which sequence each belongs to."""
    lengths = [len(prompt) + len(completion) - 1 for prompt, completion in sequences]
    starts = np.cumsum([0, *lengths])
    inputs = [token for prompt, completion in sequences for token in (*prompt, *completion[:-1])]
    targets = torch.tensor([token for _, completion in sequences for token in completion])
    predicts = [
        starts[n] + len(prompt) - 1 + offset
        for n, (prompt, completion) in enumerate(sequences)
        for offset in range(len(completion))
    ]
    sequence = torch.repeat_interleave(
        torch.arange(len(sequences)), torch.tensor([len(completion) for _, completion in sequences])
    )
    layout = PackedLayout.of_lengths(lengths, torch.device("cpu"))
    logits = packed_logits(model, input_ids=torch.tensor(inputs), layout=layout, predicts=torch.tensor(predicts))
    return logits, targets, sequence


def _encoded(tokenizer: PreTrainedTokenizerFast, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    return tokenizer.encode(prompt), [*tokenizer.encode(completion), int(tokenizer.eos_token_id)]
