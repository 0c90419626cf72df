"""The policy loss, and the weights that turn a sum over tokens into the chosen mean.

In: three policies' logprobs of the same tokens, advantages, token weights. Out: a scalar to differentiate, and what
became of each token, for the metrics. A minibatch's denominator is in the token weights, so its microbatches' losses
simply add up.

    L = - sum_t c_t (w_t f(rho_t, A_t) + entropy_coefficient H_t)          w = proximal / behaviour, without gradient

(arXiv:2110.00641, 2505.24298), with c_t the token's share of the chosen mean (`token_weights`) and H_t the entropy of
the policy where it sampled the token. f, by `kind`:

    ppo        min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); where A < 0, `dual_clip` A at least
               (arXiv:1707.06347, 1912.09729)
    cispo      clip(rho, 1 - eps_low, 1 + eps_high) A log current, without gradient through rho  (arXiv:2506.13585)
    reinforce  A log current

rho, by `ratio_level`, over the tokens in the loss of a sequence:

    token          current / proximal
    sequence_mean  their geometric mean, of one value for all tokens of the sequence  (GSPO, arXiv:2507.18071)
    sequence_sum   their product, likewise  (RLOO as TRL has it)

A sequence's ratio has its gradient token by token (GSPO-token, the same paper): rho_t = sg(rho) (current_t /
sg(current_t))^m with m = 1, or the number of tokens for the product. Where weight and advantage are the sequence's,
that sums up to the gradient of rho itself; where they are the token's, each reaches its own token alone.

`decoupled: false` puts the behaviour policy in the proximal one's place, so w is 1. What becomes of a large w stands in
`areal_rloo.algorithm.behaviour`; it is not on the entropy. Log ratios count as at most 20 and at least -20, so that
every finite input has a finite loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_rloo.algorithm.behaviour import behaviour_weights, of_sequences
from areal_rloo.algorithm.kl import LOG_LIMIT
from areal_rloo.config import LossConfig


@dataclass(frozen=True, slots=True)
class TokenOutcomes:
    """What became of the tokens in the loss of one microbatch; all [num_tokens_in_loss], without gradient.

    Attributes:
        behaviour_logprobs, proximal_logprobs, current_logprobs: float.
        entropy: float, of the current policy where it sampled the token.
        ratio: float, rho.
        ratio_clipped: bool, the clip decided the token's loss.
        ratio_limited: bool, a log ratio or a log behaviour_weight beyond 20.
        behaviour_weight: float, w as the loss used it.
        behaviour_weight_unbounded: float, w before its rule.
        behaviour_weight_clamped, behaviour_weight_masked: bool, what the rule did.
        staleness: int64, in versions.
    """

    behaviour_logprobs: Tensor
    proximal_logprobs: Tensor
    current_logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    ratio_clipped: Tensor
    ratio_limited: Tensor
    behaviour_weight: Tensor
    behaviour_weight_unbounded: Tensor
    behaviour_weight_clamped: Tensor
    behaviour_weight_masked: Tensor
    staleness: Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of a microbatch, a scalar with a gradient, and what became of its tokens."""

    loss: Tensor
    tokens: TokenOutcomes


def policy_loss(
    *,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor,
    current_logprobs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    staleness: Tensor,
    sequence_index: Tensor,
    config: LossConfig,
) -> LossOutput:
    """The loss of one microbatch, by the equation above.

    Args:
        behaviour_logprobs, proximal_logprobs, current_logprobs: [num_tokens] float; only the last has a gradient.
        entropy: [num_tokens] float, with a gradient where `entropy_coefficient` is not 0.
        advantages: [num_tokens] float.
        token_weights: [num_tokens] float; 0 takes a token out of loss and metrics, whatever its logprobs are.
        staleness: [num_tokens] int64; for the metrics alone.
        sequence_index: [num_tokens] int64, which sequence a token belongs to; whole sequences, numbered from 0.
        config: clipping and weighting.
    """
    in_loss = token_weights != 0
    current = torch.where(in_loss, current_logprobs, 0.0)
    behaviour = torch.where(in_loss, behaviour_logprobs, 0.0)
    proximal = torch.where(in_loss, proximal_logprobs, 0.0).detach()
    anchor = proximal if config.decoupled else behaviour
    log_ratio = _at_level(current - anchor, in_loss, sequence_index, config)
    log_weight = anchor - behaviour
    ratio = torch.exp(log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT))
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    correction = behaviour_weights(log_weight, in_loss, sequence_index, config.behaviour_weight)
    objective = correction.weight * _objective(ratio, clipped, current, advantages, config)
    if config.entropy_coefficient != 0:
        objective = objective + config.entropy_coefficient * torch.where(in_loss, entropy, 0.0)
    outcomes = TokenOutcomes(
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        current_logprobs=current,
        entropy=entropy,
        ratio=ratio,
        ratio_clipped=_clip_decides(ratio, clipped, advantages, config),
        ratio_limited=(log_ratio.abs() > LOG_LIMIT) | (log_weight.abs() > LOG_LIMIT),
        behaviour_weight=correction.weight,
        behaviour_weight_unbounded=correction.unbounded,
        behaviour_weight_clamped=correction.clamped,
        behaviour_weight_masked=correction.masked,
        staleness=staleness,
    )
    return LossOutput(loss=-(token_weights * objective).sum(), tokens=_chosen(outcomes, in_loss))


def _at_level(log_ratio: Tensor, in_loss: Tensor, sequence_index: Tensor, config: LossConfig) -> Tensor:
    """The log ratio of each token, or of its sequence; [num_tokens]. Tokens out of the loss are 0 already."""
    if config.ratio_level == "token" or len(log_ratio) == 0:
        return log_ratio
    value, own = log_ratio.detach(), log_ratio - log_ratio.detach()
    if config.ratio_level == "sequence_mean":
        return of_sequences(value, in_loss, sequence_index, "mean") + own
    num_tokens = of_sequences(in_loss.to(value.dtype), in_loss, sequence_index, "sum")
    return of_sequences(value, in_loss, sequence_index, "sum") + num_tokens * own


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


def _clip_decides(ratio: Tensor, clipped: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """[num_tokens] bool: the token's loss is that of a clipped ratio."""
    match config.kind:
        case "ppo":
            limited = clipped * advantages < ratio * advantages
            if config.dual_clip is not None:
                limited |= (advantages < 0) & (ratio > config.dual_clip)
            return limited
        case "cispo":
            return ratio != clipped
        case "reinforce":
            return torch.zeros_like(ratio, dtype=torch.bool)


def _chosen(outcomes: TokenOutcomes, in_loss: Tensor) -> TokenOutcomes:
    index = in_loss.nonzero()[:, 0]  # once, for on a GPU it waits
    return TokenOutcomes(
        **{name: getattr(outcomes, name).detach()[index] for name in TokenOutcomes.__dataclass_fields__}
    )


def token_weights(
    loss_mask: Tensor,
    sequence_index: Tensor,
    *,
    num_sequences: int,
    max_new_tokens: int,
    config: LossConfig,
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
    per_sequence = _per_sequence(mask, sequence_index, num_sequences)
    num_tokens, num_live = per_sequence.sum().clamp(min=1), (per_sequence > 0).sum().clamp(min=1)
    match config.aggregation:
        case "token_mean":
            weights = mask / num_tokens
        case "seq_mean_token_mean":
            weights = mask / (num_live * per_sequence.clamp(min=1)[sequence_index])
        case "seq_mean_token_sum":
            weights = mask / num_live
        case "seq_mean_token_sum_norm":
            weights = mask / (num_live * max_new_tokens)
    shares: Tensor = weights.float()
    return shares


def _per_sequence(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[num_sequences] float64: tokens in the loss of each."""
    zeros = torch.zeros(num_sequences, dtype=torch.float64, device=mask.device)
    return zeros.scatter_add(0, sequence_index, mask)
