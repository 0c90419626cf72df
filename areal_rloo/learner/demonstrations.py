"""Train the built-in tiny model on noisy demonstrations, the short supervised start before RL.

Training ends at an accuracy, not after a number of steps: accuracy rises so steeply that a fixed number of steps would
give a different accuracy on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from areal_rloo.config import SourceConfig, WarmStartConfig
from areal_rloo.learner.packing import Microbatch, Row
from areal_rloo.learner.parallel.rows import plan_rows
from areal_rloo.models.loading import PACKED_ATTENTION
from areal_rloo.models.policy import last_hidden
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.tasks.arithmetic import ArithmeticTask, demonstration
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_CHECK_EVERY = 20
_HOPEFUL_LOSS = 0.25  # above this loss hardly any completion is correct, and checking costs as much as a step
_NUM_VALIDATION = 200
_ROW_TOKENS = 8192


Example = tuple[str, str]
"""A prompt and a completion."""

Draw = Callable[[int], Sequence[Example]]
"""Draw a number of noisy demonstrations."""


def sums(config: WarmStartConfig, *, seed: int) -> tuple[Draw, list[Example]]:
    """Return the demonstrations of the built-in arithmetic, and examples without errors to validate."""
    task = ArithmeticTask(SourceConfig(), seed)
    items, rng = task.items("train"), random.Random(seed)

    def draw(num: int) -> list[Example]:
        chosen = [items[rng.randrange(len(items))] for _ in range(num)]
        return [(item.text, demonstration(item, rng, error_rate=config.error_rate)) for item in chosen]

    held_out = task.validation_items()[:_NUM_VALIDATION]
    return draw, [(item.text, demonstration(item, rng, error_rate=0.0)) for item in held_out]


def train_on_demonstrations(
    model: PreTrainedModel, config: WarmStartConfig, draw: Draw, examples: Sequence[Example]
) -> float:
    """Train with AdamW until greedy accuracy reaches `until_accuracy`, then restore earlier, weaker weights.

    The restored weights are the last with greedy accuracy of at most `keep_accuracy` on the examples, so RL has
    something to learn. Returns the greedy accuracy of these weights.
    """
    tokenizer = make_tiny_tokenizer()
    validation = [_encoded(tokenizer, *example) for example in examples]
    model.set_attn_implementation(PACKED_ATTENTION)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    kept, kept_step, kept_accuracy, accuracy = deepcopy(model.state_dict()), 0, 0.0, 0.0
    for step in range(1, config.max_steps + 1):
        loss = _step(model, optimizer, [_encoded(tokenizer, *drawn) for drawn in draw(config.batch_size)])
        if step % 200 == 0:
            logger.info("warm start: step %d, loss %.3f, greedy accuracy %.2f", step, loss, accuracy)
        if step % _CHECK_EVERY == 0 and loss < _HOPEFUL_LOSS:
            accuracy = _greedy_accuracy(model, validation)
            if accuracy <= config.keep_accuracy:
                kept, kept_step, kept_accuracy = deepcopy(model.state_dict()), step, accuracy
            if accuracy >= config.until_accuracy:
                break
    else:
        logger.warning("warm start: greedy accuracy %.2f after %d steps; continuing", accuracy, config.max_steps)
    model.load_state_dict(kept)
    logger.info("warm start: keeping the weights of step %d, greedy accuracy %.2f", kept_step, kept_accuracy)
    return kept_accuracy


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
def _greedy_accuracy(model: PreTrainedModel, sequences: Sequence[tuple[list[int], list[int]]]) -> float:
    """Return the share of sequences whose completion greedy decoding would reproduce exactly.

    Greedy decoding reproduces a completion if and only if the most likely token is correct at every place, given the
    correct tokens before. So a single forward pass replaces decoding token by token.
    """
    num_right = 0
    (rows,) = plan_rows([len(p) + len(c) - 1 for p, c in sequences], _ROW_TOKENS)
    for row in rows:
        logits, targets, sequence = _forward(model, [sequences[index] for index in row])
        wrong = sequence[logits.argmax(-1) != targets]
        num_right += len(row) - len(wrong.unique())
    return num_right / len(sequences)


def _forward(model: PreTrainedModel, sequences: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits at the completion tokens, these tokens, and the sequence of each."""
    microbatch = Microbatch(
        lengths=[len(prompt) + len(completion) - 1 for prompt, completion in sequences],
        num_targets=[len(completion) for _, completion in sequences],
        tokens=torch.tensor([token for prompt, completion in sequences for token in (*prompt, *completion)]),
        columns={},
    )
    row = Row.of(microbatch, torch.device("cpu"))
    hidden = last_hidden(model, row.input_ids, row.layout).index_select(0, row.predicts)
    logits: Tensor = hidden @ model.get_output_embeddings().weight.T
    return logits, row.targets, row.sequence_index


def _encoded(tokenizer: PreTrainedTokenizerFast, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    return tokenizer.encode(prompt), [*tokenizer.encode(completion), int(tokenizer.eos_token_id)]
