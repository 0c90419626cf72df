"""Compute the policy loss of a microbatch, and the token weights that turn a sum over tokens into a mean.

Takes the logprobs of the same tokens under three policies, advantages and token weights. Returns a scalar to
differentiate and the outcome of each token for the metrics. The denominator of a minibatch is in the token weights, so
the losses of microbatches add up.

    L = - sum_t c_t (w_t f(rho_t, A_t) + entropy_coefficient H_t)          w = proximal / behaviour, without gradient

(arXiv:2110.00641, 2505.24298). c_t is the share of the token in the chosen mean (`token_weights`), H_t the entropy of
the policy at the token. f, by `kind`:

    ppo        min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); if A < 0, at least `dual_clip` A
               (arXiv:1707.06347, 1912.09729)
    cispo      clip(rho, 1 - eps_low, 1 + eps_high) A log current, without gradient through rho  (arXiv:2506.13585)
    reinforce  A log current

rho, by `ratio_level`, over the tokens in the loss of a sequence:

    token          current / proximal
    sequence_mean  their geometric mean, the same for all tokens of the sequence  (GSPO, arXiv:2507.18071)
    sequence_sum   their product, likewise  (RLOO as in TRL)

The ratio of a sequence has a gradient token by token (GSPO-token, same paper): rho_t = sg(rho) (current_t /
sg(current_t))^m, with m = 1 for the mean and m = number of tokens for the product. If weight and advantage are the same
for all tokens of the sequence, the sum is the gradient of rho. Otherwise weights and advantages differ by token.

With `decoupled: false` the behaviour policy replaces the proximal policy, so w = 1. The entropy term has no w. Log
ratios are clamped to [-20, 20], so every finite input has a finite loss and gradient.

`behaviour_weight` bounds w. The `metric` is

    ratio  w            k1  log w            k2  (log w)^2 / 2            k3  w - 1 - log w

per token. With `level: sequence`, the metric is the mean, sum or maximum over the tokens in the loss; for `ratio` these
are taken of log w, so the mean is geometric. With `level: sequence` and `metric: ratio`, w itself is the product
(`sum`) or the geometric mean (otherwise) and the same for all tokens of the sequence. The `rule` for tokens out of
bounds: `mask` removes them from the loss, `clamp` sets w to the bound, `none` keeps w. `ignore` sets every w to 1, so
there is no correction. Denominators do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_rloo.algorithm.kl import LOG_LIMIT, kl_estimate
from areal_rloo.config import BehaviourWeightConfig, LossConfig


class TokenOutcomes(NamedTuple):
    """Outcomes of the tokens in the loss of a microbatch; all [num_tokens_in_loss], without gradient."""

    behaviour_logprobs: Tensor  # float, like the next two
    proximal_logprobs: Tensor
    current_logprobs: Tensor
    entropy: Tensor  # float, of the current policy at the token
    ratio: Tensor  # float, rho
    ratio_clipped: Tensor  # bool, the clip decided the loss of the token
    ratio_limited: Tensor  # bool, a log ratio or a log behaviour_weight is beyond 20
    behaviour_weight: Tensor  # float, w as used in the loss; 0 if masked
    behaviour_weight_unbounded: Tensor  # float, w before the rule
    behaviour_weight_clamped: Tensor  # bool, the effect of the rule
    behaviour_weight_masked: Tensor  # bool, likewise
    staleness: Tensor  # int64, in versions

    @classmethod
    def joined(cls, parts: Sequence[TokenOutcomes]) -> TokenOutcomes:
        """Concatenate the outcomes of several microbatches."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


class LossOutput(NamedTuple):
    """The loss of a microbatch, a scalar with a gradient, and the outcomes of the tokens."""

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
    """Compute the loss of a microbatch by the equation above.

    All tensors are [num_tokens]; staleness and sequence_index are int64, the others float. Only the current logprobs,
    and with an `entropy_coefficient` the entropies, have a gradient. A token weight of 0 removes a token from loss and
    metrics, whatever the logprobs are. `sequence_index` numbers the sequences of the tokens from 0; all are whole.
    """
    in_loss = token_weights != 0
    current = torch.where(in_loss, current_logprobs, 0.0)
    behaviour = torch.where(in_loss, behaviour_logprobs, 0.0)
    proximal = torch.where(in_loss, proximal_logprobs, 0.0).detach()
    anchor = proximal if config.decoupled else behaviour
    log_ratio = _at_level(current - anchor, in_loss, sequence_index, config)
    log_weight = anchor - behaviour
    ratio = _exp(log_ratio)
    objective, clip_decides = _objective(ratio, current, advantages, config)
    correction = behaviour_weights(log_weight, in_loss, sequence_index, config.behaviour_weight)
    objective = correction.weight * objective
    if config.entropy_coefficient != 0:
        objective = objective + config.entropy_coefficient * torch.where(in_loss, entropy, 0.0)
    outcomes = TokenOutcomes(
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        current_logprobs=current,
        entropy=entropy,
        ratio=ratio,
        ratio_clipped=clip_decides,
        ratio_limited=(log_ratio.abs() > LOG_LIMIT) | (log_weight.abs() > LOG_LIMIT),
        behaviour_weight=correction.weight,
        behaviour_weight_unbounded=correction.unbounded,
        behaviour_weight_clamped=correction.clamped,
        behaviour_weight_masked=correction.masked,
        staleness=staleness,
    )
    index = in_loss.nonzero()[:, 0]  # once: on a GPU, nonzero waits for the device
    tokens = TokenOutcomes(*(values.detach()[index] for values in outcomes))
    return LossOutput(loss=-(token_weights * objective).sum(), tokens=tokens)


def _at_level(log_ratio: Tensor, in_loss: Tensor, sequence_index: Tensor, config: LossConfig) -> Tensor:
    """Return the log ratio of each token or sequence, [num_tokens]. Tokens out of the loss are already 0."""
    if config.ratio_level == "token" or len(log_ratio) == 0:
        return log_ratio
    value, own = log_ratio.detach(), log_ratio - log_ratio.detach()
    if config.ratio_level == "sequence_mean":
        return _of_sequences(value, in_loss, sequence_index, "mean") + own
    num_tokens = _of_sequences(in_loss.to(value.dtype), in_loss, sequence_index, "sum")
    return _of_sequences(value, in_loss, sequence_index, "sum") + num_tokens * own


def _objective(ratio: Tensor, current: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return f(rho_t, A_t), to be maximized, and whether f uses a clipped ratio: [num_tokens] float and bool."""
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    match config.kind:
        case "ppo":
            free, bounded = ratio * advantages, clipped * advantages
            objective, clip_decides = torch.minimum(free, bounded), bounded < free
            if config.dual_clip is not None:
                losing = advantages < 0
                objective = torch.where(losing, objective.maximum(config.dual_clip * advantages), objective)
                clip_decides |= losing & (ratio > config.dual_clip)
            return objective, clip_decides
        case "cispo":
            return clipped.detach() * advantages * current, ratio != clipped
        case "reinforce":
            return advantages * current, torch.zeros_like(ratio, dtype=torch.bool)


class BehaviourWeights(NamedTuple):
    """All [num_tokens], without gradient; `TokenOutcomes` describes them."""

    weight: Tensor
    unbounded: Tensor
    clamped: Tensor
    masked: Tensor


def behaviour_weights(
    log_weight: Tensor, in_loss: Tensor, sequence_index: Tensor, rule: BehaviourWeightConfig
) -> BehaviourWeights:
    """Compute the weights of a microbatch and apply the rule for weights out of bounds.

    All tensors are [num_tokens]: log_weight float, log proximal - log behaviour, 0 outside the loss; in_loss bool;
    sequence_index as in `policy_loss`.
    """
    log_weight = torch.zeros_like(log_weight) if rule.rule == "ignore" else log_weight.detach()
    own = judged = log_weight
    if rule.metric in ("k2", "k3"):  # of KL(behaviour, proximal)
        judged = kl_estimate(torch.zeros_like(log_weight), log_weight, rule.metric)
    if rule.level == "sequence" and len(log_weight) > 0:
        judged = _of_sequences(judged, in_loss, sequence_index, rule.aggregate)
        if rule.metric == "ratio":
            own = _of_sequences(log_weight, in_loss, sequence_index, "sum" if rule.aggregate == "sum" else "mean")
    unbounded = _exp(own)
    if rule.metric == "ratio":
        judged = _exp(judged)
    nothing = torch.zeros_like(in_loss)
    lower = (0.0 if rule.metric == "ratio" else -math.inf) if rule.lower is None else rule.lower
    upper = math.inf if rule.upper is None else rule.upper
    outside = (judged > upper) | (judged < lower)
    if rule.rule == "mask":
        return BehaviourWeights(torch.where(outside, 0.0, unbounded), unbounded, nothing, outside & in_loss)
    if rule.rule == "clamp":
        weight = torch.where(outside, unbounded.clamp(lower, upper), unbounded)
        return BehaviourWeights(weight, unbounded, (weight != unbounded) & in_loss, nothing)
    return BehaviourWeights(unbounded, unbounded, nothing, nothing)


def interpolated_proximal(behaviour_logprobs: Tensor, current_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Approximate proximal logprobs without a forward pass: log-linear between behaviour and current policy.

        log proximal = log behaviour + s / (s + 1) (log current - log behaviour)

    A token of version v - s is s versions older than the proximal policy v. The current policy is on the way to version
    v + 1. For a fresh token (s = 0) the behaviour policy is the proximal policy, and the result is exact.

    All are [num_tokens]: logprobs and result float, the result without gradient; staleness int64.
    """
    share = staleness.to(current_logprobs.dtype) / (staleness + 1)
    return behaviour_logprobs + share * (current_logprobs.detach() - behaviour_logprobs)


def _of_sequences(values: Tensor, in_loss: Tensor, sequence_index: Tensor, how: str) -> Tensor:
    """Replace each value by the `sum`, `mean` or `max` over the tokens in the loss of the same sequence.

    `values` must be 0 outside the loss. A sequence without a token in the loss gives 0.
    """
    zeros = values.new_zeros(int(sequence_index.max()) + 1)
    if how == "max":
        counted = torch.where(in_loss, values, -torch.inf)
        of_each = torch.full_like(zeros, -torch.inf).scatter_reduce(0, sequence_index, counted, "amax")
        of_each = torch.where(of_each > -torch.inf, of_each, 0.0)
    else:
        of_each = zeros.scatter_add(0, sequence_index, values)
        if how == "mean":
            of_each = of_each / zeros.scatter_add(0, sequence_index, in_loss.to(values.dtype)).clamp(min=1)
    return of_each[sequence_index]


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT))


def written_by_policy(spans: Sequence[int], num_tokens: int) -> npt.NDArray[np.bool_]:
    """Return True where the policy wrote the token, [num_tokens] bool; only these may have a gradient or a KL.

    Spans alternate: the policy wrote the first, a tool or a user the second, and so on. Without spans the policy wrote
    all tokens.
    """
    if not spans:
        return np.ones(num_tokens, dtype=np.bool_)
    mask: npt.NDArray[np.bool_] = np.repeat(np.arange(len(spans)) % 2 == 0, spans)
    assert len(mask) == num_tokens, f"spans {spans} of {num_tokens} tokens"
    return mask


def token_weights(loss_mask: Tensor, sequence_index: Tensor, *, max_new_tokens: int, config: LossConfig) -> Tensor:
    """Return the share of each token in the mean of the minibatch; zeros outside the mask.

        token_mean               1 / N                 N tokens in the loss
        seq_mean_token_mean      1 / (S n_s)           S sequences with a token in the loss, n_s tokens in sequence s
        seq_mean_token_sum       1 / S
        seq_mean_token_sum_norm  1 / (S max_new_tokens)         (Dr. GRPO, arXiv:2503.20783)

    Takes all completion tokens of the minibatch: loss_mask [num_tokens] bool and sequence_index [num_tokens] int64.
    Returns [num_tokens] float32; the first two kinds sum to 1.
    """
    mask = loss_mask.double()
    per_sequence = mask.new_zeros(int(sequence_index.max()) + 1).scatter_add(0, sequence_index, mask)
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
    return weights.float()
