"""Build AdamW and the schedule from the config, and move optimizer states between devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from areal_rloo.config import OptimizerConfig


def make_optimizer(
    policy: torch.nn.Module, config: OptimizerConfig, *, num_optimizer_steps: int
) -> tuple[Optimizer, LambdaLR]:
    """Build AdamW over the trainable float32 weights, and a schedule to advance once per optimizer step."""
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    groups = _groups(policy, config)
    low = config.state_dtype == "bfloat16"
    optimizer = LowPrecisionAdamW(groups, **options) if low else AdamW(groups, **options, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: schedule_factor(step, config, num_optimizer_steps))


def _groups(policy: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group the trainable parameters by weight decay; norms, biases and embeddings have none unless `decay_all`."""
    embeddings = [module.weight for module in policy.modules() if isinstance(module, torch.nn.Embedding)]
    undecayed = set() if config.decay_all else {id(weight) for weight in embeddings}  # a tied head is an embedding
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in policy.parameters():
        if parameter.requires_grad:
            decays = config.decay_all or (parameter.ndim > 1 and id(parameter) not in undecayed)
            groups.setdefault(config.weight_decay if decays else 0.0, []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]


def schedule_factor(step: int, config: OptimizerConfig, num_optimizer_steps: int) -> float:
    """Return the factor on the learning rate: linear warm-up, then constant or decaying to `final_share` at the end."""
    num_warmup = config.warmup_steps or math.ceil(config.warmup_share * num_optimizer_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    if config.schedule == "constant":
        return 1.0
    progress = (step - num_warmup) / max(1, num_optimizer_steps - num_warmup)
    remaining = max(0.0, 1.0 - progress)
    decayed = remaining if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * remaining))
    return config.final_share + (1 - config.final_share) * decayed


def set_schedule(schedule: LambdaLR, num_optimizer_steps: int) -> None:
    """Set a schedule to the state after `num_optimizer_steps`."""
    factor = schedule.lr_lambdas[0]  # the same for all groups
    rates = [base * factor(num_optimizer_steps) for base in schedule.base_lrs]
    counts = {"last_epoch": num_optimizer_steps, "_step_count": num_optimizer_steps + 1}
    schedule.load_state_dict({**schedule.state_dict(), **counts, "_last_lr": rates})
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class LowPrecisionAdamW(AdamW):
    """AdamW (arXiv:1711.05101) with computation in float32 and moments stored in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(empty_state(parameter, self))
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        first = state["exp_avg"].to(gradient.dtype).lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].to(gradient.dtype).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        parameter.addcdiv_(first, scale, value=-group["lr"] / (1 - beta1**step))


def empty_state(parameter: torch.nn.Parameter, optimizer: Optimizer) -> dict[str, Tensor]:
    """Make the initial optimizer state of a parameter, to be filled by a step or from a checkpoint."""
    low = isinstance(optimizer, LowPrecisionAdamW)
    dtype = torch.bfloat16 if low else parameter.dtype
    return {
        "step": torch.zeros((), device="cpu" if low else parameter.device),  # the fused step reads it on the device
        "exp_avg": torch.zeros_like(parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
    }


def make_states(optimizer: Optimizer, home: torch.device) -> None:
    """Make all missing states, with the moments at `home`; so the first train step needs as much memory as the next."""
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter in (parameter for parameter in trained if not optimizer.state.get(parameter)):
        optimizer.state[parameter] = empty_state(parameter, optimizer)
        _move_moments(optimizer, parameter, home)


def step_with_states_from(optimizer: Optimizer, home: torch.device, device: torch.device) -> None:
    """Take an optimizer step on `device`. If the moments are at another `home`, step a parameter at a time.

    So the device has the moments of a single parameter at most. AdamW updates each parameter alone, so the result is
    the same to the bit.
    """
    if home == device:
        optimizer.step()
        return
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = []
        for group, parameters in zip(groups, whole, strict=True):
            for parameter in parameters:
                group["params"] = [parameter]
                _move_moments(optimizer, parameter, device)
                optimizer.step()
                _move_moments(optimizer, parameter, home)
            group["params"] = []
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters


def _move_moments(optimizer: Optimizer, parameter: Tensor, place: torch.device) -> None:
    state = optimizer.state.get(parameter, {})
    state.update({name: value.to(place) for name, value in state.items() if name != "step"})
