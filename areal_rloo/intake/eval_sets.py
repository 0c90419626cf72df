"""The prompts of the evaluation sets of a config, tokenized."""

from __future__ import annotations

from areal_rloo.config import Config
from areal_rloo.intake.evaluation import EvalSet
from areal_rloo.intake.prompts import Prompt
from areal_rloo.tasks import load_eval
from areal_rloo.tasks.chat import Tokenizer
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)


def eval_sets(config: Config, tokenize: Tokenizer) -> list[EvalSet]:
    """Load and tokenize every set of `data.eval`; say how many prompts are truncated or left out.

    Raises:
        DataError: a set cannot be read, or a prompt is too long.
    """
    sets = []
    sources = load_eval(config.data, seed=config.run.seed, most_item_bytes=config.wire.most_item_bytes)
    for source, settings in zip(sources, config.data.eval_sources, strict=True):
        num_truncated = tokenize.num_truncated
        tokenized = [(index, tokenize(item, 1 + index), item) for index, item in enumerate(source.items)]
        prompts = [Prompt(0, index, tokens, item) for index, tokens, item in tokenized if tokens is not None]
        if tokenize.num_truncated > num_truncated:
            num_truncated = tokenize.num_truncated - num_truncated
            logger.warning("evaluation on %s truncates %d prompts", source.label, num_truncated)
        if len(prompts) < len(tokenized):
            text = "evaluation on %s leaves out %d of %d prompts for their length"
            logger.warning(text, source.label, len(tokenized) - len(prompts), len(tokenized))
        sets.append(EvalSet(source.label, prompts, settings.num_samples))
    return sets
