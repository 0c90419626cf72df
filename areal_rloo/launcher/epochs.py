"""The train steps of `data.num_epochs`, for `learner.num_train_steps: auto`. Reads the train sources; without torch."""

from __future__ import annotations

import msgspec

from areal_rloo.config import Config, validate
from areal_rloo.tasks import load_train


def with_steps(config: Config, *, num_prompts: int | None = None) -> Config:
    """Replace `auto` by the steps in which every prompt is trained `data.num_epochs` times; the last may be smaller.

    Prompts that are left out or dropped make fewer steps: the run then ends when the data ends. `num_prompts`: of all
    train sources; None: read the sources.

    Raises:
        UserError: a source cannot be read.
    """
    if config.learner.num_train_steps or config.data.num_epochs is None:
        return config
    if num_prompts is None:
        sources = load_train(config.data, seed=config.run.seed, most_item_bytes=config.wire.most_item_bytes)
        num_prompts = sum(len(source.items) for source in sources)
    num_steps = max(1, -(-config.data.num_epochs * num_prompts // config.learner.groups_per_step))
    learner = msgspec.structs.replace(config.learner, num_train_steps=num_steps)
    config = msgspec.structs.replace(config, learner=learner)
    validate(config)
    return config
