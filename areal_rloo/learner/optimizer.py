"""AdamW and its schedule, from the config."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from areal_rloo.config import OptimizerConfig


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, num_optimizer_steps: int
) -> tuple[AdamW, LambdaLR]:
    """AdamW over float32 weights; the schedule is stepped once per optimizer step."""
    optimizer = AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    return optimizer, LambdaLR(optimizer, lambda step: schedule_factor(step, config, num_optimizer_steps))


def schedule_factor(step: int, config: OptimizerConfig, num_optimizer_steps: int) -> float:
    """Factor on the learning rate: linear warm-up, then constant, or down to 0 at the end."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, num_optimizer_steps - config.warmup_steps)
    remaining = max(0.0, 1.0 - progress)
    return remaining if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * remaining))
