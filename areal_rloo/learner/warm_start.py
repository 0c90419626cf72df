"""Makes the built-in tiny model on first use: random weights, then a short supervised start on noisy demonstrations.

It runs as a process of its own before learner and workers start (`python -m areal_rloo.learner.warm_start`), and is
skipped when a model of the same recipe is in the cache. The start ends by accuracy, not after a number of steps:
accuracy rises so steeply that a count would land elsewhere on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from areal_rloo.config import Config, SourceConfig, WarmStartConfig, import_entry, load_config
from areal_rloo.errors import UserError
from areal_rloo.learner.packing import plan_rows
from areal_rloo.models.attention import PACKED_ATTENTION, PackedLayout
from areal_rloo.models.policy import packed_logits
from areal_rloo.models.tiny import make_tiny_model, make_tiny_tokenizer, save_tiny_model
from areal_rloo.tasks.arithmetic import ArithmeticTask, demonstration
from areal_rloo.telemetry.logs import get_logger, setup_logs

logger = get_logger(__name__)

_RECIPE_VERSION = 1  # raise it when the same options make another model
_CHECK_EVERY = 20
_HOPEFUL_LOSS = 0.25  # above it hardly any completion is right, and looking costs as much as a step
_NUM_VALIDATION = 200
_ROW_TOKENS = 8192


class PreparedModel(msgspec.Struct, frozen=True):
    """Where the model lies, how long making it took, and how often it was right (greedy, on validation prompts)."""

    path: str
    warm_start_s: float
    accuracy: float | None
    cached: bool


def prepare_tiny_model(config: Config, models: Path | None = None) -> PreparedModel:
    """The model of `model.tiny`, from the cache or made now; safe when two processes make it at once.

    Args:
        config: of the run.
        models: the folder of models that all hosts of the run see; None for the cache of this host.
    """
    warm_start = config.model.tiny.warm_start
    if not config.warm_starts:
        tasks = ", ".join(source.task for source in config.data.train_sources)
        logger.info("no demonstrations of %s: the tiny model keeps its random weights", tasks)
        warm_start = None
    recipe = msgspec.structs.replace(config.model.tiny, warm_start=warm_start)
    digest = hashlib.sha256(msgspec.json.encode((recipe, _RECIPE_VERSION))).hexdigest()[:16]
    folder = (models or _cache_folder()) / f"tiny-{digest}"
    if folder.is_dir():
        logger.info("the tiny model is in the cache: %s", folder)
        return PreparedModel(str(folder), 0.0, None, cached=True)
    started_s = time.monotonic()
    model = make_tiny_model(recipe)
    accuracy = None if warm_start is None else train_on_demonstrations(model, warm_start, seed=recipe.seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    save_tiny_model(model, unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster; its model is the same
        shutil.rmtree(unfinished)
    return PreparedModel(str(folder), time.monotonic() - started_s, accuracy, cached=False)


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


def _cache_folder() -> Path:
    override = os.environ.get("AREAL_RLOO_CACHE")
    return (Path(override) if override else Path.home() / ".cache" / "areal_rloo") / "models"


def main() -> int:
    """Prepare the model of a resolved config and write what came of it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.learner.warm_start")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--models", type=Path, help="folder for models that other hosts read too")
    arguments = parser.parse_args()
    folder: Path = arguments.run_folder
    torch.set_num_threads(arguments.num_threads)
    transformers_logging.disable_progress_bar()
    try:
        config = load_config(str(folder / "config.yaml"))
        setup_logs("warm_start", level=config.telemetry.log_level, file=folder / "logs" / "warm_start.log")
        import_entry(config.run.entry)
        prepared = prepare_tiny_model(config, arguments.models)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the face of this process
        return 2
    (folder / "model.json").write_bytes(msgspec.json.encode(prepared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
