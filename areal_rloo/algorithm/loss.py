"""The policy loss, and the weights that turn a sum over tokens into the chosen mean.

In: three policies' logprobs of the same tokens, advantages, token weights. Out: a scalar to differentiate, and sums for
the metrics. A minibatch's denominator is in the token weights, so its microbatches' losses simply add up.

    L = - sum_t c_t w_t f(rho_t, A_t)          w = proximal / behaviour, without gradient

(arXiv:2110.00641, 2505.24298), with c_t the token's share of the chosen mean (`token_weights`). f, by `kind`:

    ppo        min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); where A < 0, `dual_clip` A at least
               (arXiv:1707.06347, 1912.09729)
    cispo      clip(rho, 1 - eps_low, 1 + eps_high) A log current, without gradient through rho  (arXiv:2506.13585)
    reinforce  A log current

rho, by `ratio_level`, over the tokens in the loss of a sequence:

    token          current / proximal
    sequence_mean  their geometric mean, for every token of the sequence alike  (GSPO, arXiv:2507.18071)
    sequence_sum   their product, for every token of the sequence alike  (RLOO as TRL has it)

`decoupled: false` puts the behaviour policy in the proximal one's place, so w is 1. The behaviour_weight rule says what
becomes of a large w: `clamp` limits it to `upper`, `mask` takes the token out of the loss, `none` leaves it. Log ratios
count as at most 20 and at least -20, so that every finite input has a finite loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_rloo.config import LossConfig

_LOG_LIMIT = 20.0  # of log ratios: e^20 squares without overflow, and no ratio that large has a meaning of its own


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What one microbatch gives; the sums are over tokens in the loss, detached, float64 scalars."""

    loss: Tensor
    num_tokens: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    ratio_clipped: Tensor
    ratio_limited: Tensor
    behaviour_weight_sum: Tensor
    behaviour_weight_max: Tensor
    behaviour_weight_limited: Tensor
    negative_logprob_sum: Tensor


def policy_loss(
    *,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor,
    current_logprobs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    sequence_index: Tensor,
    config: LossConfig,
) -> LossOutput:
    """The loss of one microbatch, by the equation above.

    Args:
        behaviour_logprobs, proximal_logprobs, current_logprobs: [num_tokens] float; only the last has a gradient.
        advantages: [num_tokens] float.
        token_weights: [num_tokens] float; 0 takes a token out of loss and metrics, whatever its logprobs are.
        sequence_index: [num_tokens] int64, which sequence a token belongs to; whole sequences, numbered from 0.
        config: clipping and weighting.
    """
    in_loss = token_weights != 0
    current = torch.where(in_loss, current_logprobs, torch.zeros_like(current_logprobs))
    behaviour = torch.where(in_loss, behaviour_logprobs, torch.zeros_like(behaviour_logprobs))
    proximal = torch.where(in_loss, proximal_logprobs, torch.zeros_like(proximal_logprobs)).detach()
    anchor = proximal if config.decoupled else behaviour
    log_ratio = _at_level(current - anchor, in_loss, sequence_index, config)
    ratio = torch.exp(log_ratio.clamp(-_LOG_LIMIT, _LOG_LIMIT))
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    raw_weight = torch.exp((anchor - behaviour).clamp(-_LOG_LIMIT, _LOG_LIMIT))
    weight, weight_limited = _limited(raw_weight, config)
    loss = -(token_weights * weight * _objective(ratio, clipped, current, advantages, config)).sum()

    with torch.no_grad():
        mask = in_loss.double()
        return LossOutput(
            loss=loss,
            num_tokens=mask.sum(),
            ratio_sum=(ratio * mask).sum(),
            ratio_max=(ratio * mask).max(),
            ratio_clipped=((clipped * advantages < ratio * advantages) * mask).sum(),
            ratio_limited=((log_ratio.abs() > _LOG_LIMIT) * mask).sum(),
            behaviour_weight_sum=(weight * mask).sum(),
            behaviour_weight_max=(raw_weight * mask).max(),
            behaviour_weight_limited=(weight_limited * mask).sum(),
            negative_logprob_sum=-(current * mask).sum(),
        )


def _objective(ratio: Tensor, clipped: Tensor, current: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """f(rho_t, A_t), to be maximized."""
    match config.kind:
        case "ppo":
            objective = torch.minimum(ratio * advantages, clipped * advantages)
            if config.dual_clip is None:
                return objective
            return torch.where(advantages < 0, objective.maximum(config.dual_clip * advantages), objective)
        case "cispo":
            return clipped.detach() * advantages * current
        case "reinforce":
            return advantages * current


def _at_level(log_ratio: Tensor, in_loss: Tensor, sequence_index: Tensor, config: LossConfig) -> Tensor:
    """The log ratio of each token, or of its sequence; [num_tokens]. Tokens out of the loss are 0 already."""
    if config.ratio_level == "token" or len(log_ratio) == 0:
        return log_ratio
    zeros = log_ratio.new_zeros(int(sequence_index.max()) + 1)
    total = zeros.scatter_add(0, sequence_index, log_ratio)
    if config.ratio_level == "sequence_mean":
        total = total / zeros.scatter_add(0, sequence_index, in_loss.to(log_ratio.dtype)).clamp(min=1)
    return total[sequence_index]


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
