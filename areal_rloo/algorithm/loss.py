"""The decoupled PPO loss, and the weights that turn a sum over tokens into the chosen mean.

In: three policies' logprobs of the same tokens, advantages, token weights. Out: a scalar to differentiate, and sums for
the metrics. A minibatch's denominator is in the token weights, so its microbatches' losses simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_rloo.config import LossConfig


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What one microbatch gives; the sums are over tokens in the loss, detached, float64 scalars."""

    loss: Tensor
    num_tokens: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    ratio_clipped: Tensor
    behaviour_weight_sum: Tensor
    behaviour_weight_max: Tensor
    behaviour_weight_limited: Tensor
    negative_logprob_sum: Tensor


def decoupled_ppo_loss(
    *,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor,
    current_logprobs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    config: LossConfig,
) -> LossOutput:
    """Clip against the proximal policy, reweight to the behaviour policy (arXiv:2110.00641, 2505.24298).

        L = - sum_t c_t w_t min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)
        rho = current / proximal,  w = proximal / behaviour without gradient

    with c_t the token's share of the chosen mean (`token_weights`). `decoupled: false` clips against the behaviour
    policy instead, and w is 1. The behaviour_weight rule says what becomes of a large w: `clamp` limits it to `upper`,
    `mask` takes the token out of the loss, `none` leaves it.

    Args:
        behaviour_logprobs, proximal_logprobs, current_logprobs: [num_tokens] float32; only the last has a gradient.
        advantages: [num_tokens] float32.
        token_weights: [num_tokens] float32; 0 takes a token out of loss and metrics, whatever its logprobs are.
        config: clipping and weighting.
    """
    in_loss = token_weights != 0
    current = torch.where(in_loss, current_logprobs, torch.zeros_like(current_logprobs))
    behaviour = torch.where(in_loss, behaviour_logprobs, torch.zeros_like(behaviour_logprobs))
    proximal = torch.where(in_loss, proximal_logprobs, torch.zeros_like(proximal_logprobs)).detach()
    anchor = proximal if config.decoupled else behaviour
    ratio = torch.exp(current - anchor)
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    unweighted = torch.minimum(ratio * advantages, clipped * advantages)

    raw_weight = torch.exp(anchor - behaviour)
    weight, limited = _limited(raw_weight, config)
    loss = -(token_weights * weight * unweighted).sum()

    with torch.no_grad():
        mask = in_loss.double()
        return LossOutput(
            loss=loss,
            num_tokens=mask.sum(),
            ratio_sum=(ratio * mask).sum(),
            ratio_max=(ratio * mask).max(),
            ratio_clipped=((clipped * advantages < ratio * advantages) * mask).sum(),
            behaviour_weight_sum=(weight * mask).sum(),
            behaviour_weight_max=(raw_weight * mask).max(),
            behaviour_weight_limited=(limited * mask).sum(),
            negative_logprob_sum=-(current * mask).sum(),
        )


def _limited(weight: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Apply the behaviour_weight rule; also which tokens it touched."""
    rule = config.behaviour_weight
    limited = weight > rule.upper
    if rule.rule == "clamp":
        return weight.clamp(max=rule.upper), limited
    if rule.rule == "mask":
        return torch.where(limited, torch.zeros_like(weight), weight), limited
    return weight, torch.zeros_like(limited)


def token_weights(
    loss_mask: Tensor, sequence_index: Tensor, *, num_sequences: int, max_new_tokens: int, config: LossConfig
) -> Tensor:
    """The share of each token of a minibatch in its mean; zeros outside the mask.

        token_mean               1 / N                 N tokens in the loss
        seq_mean_token_mean      1 / (S n_s)           S sequences with a token in the loss, n_s of them in this one
        seq_mean_token_sum       1 / S
        seq_mean_token_sum_norm  1 / (S max_new_tokens)         (Dr. GRPO, arXiv:2503.20783)

    Args:
        loss_mask: [num_tokens] bool, all completion tokens of the minibatch.
        sequence_index: [num_tokens] int64 in [0, num_sequences).
        num_sequences: sequences of the minibatch.
        max_new_tokens: the constant length of `seq_mean_token_sum_norm`.
        config: `aggregation`.

    Returns:
        [num_tokens] float32; they sum to 1 for the first two.
    """
    mask = loss_mask.double()
    per_sequence = torch.zeros(num_sequences, dtype=torch.float64, device=mask.device)
    per_sequence = per_sequence.scatter_add(0, sequence_index, mask)
    num_live = (per_sequence > 0).sum().clamp(min=1)
    match config.aggregation:
        case "token_mean":
            weights = mask / mask.sum().clamp(min=1)
        case "seq_mean_token_mean":
            weights = mask / (num_live * per_sequence.clamp(min=1)[sequence_index])
        case "seq_mean_token_sum":
            weights = mask / num_live
        case "seq_mean_token_sum_norm":
            weights = mask / (num_live * max_new_tokens)
    return weights.float()
