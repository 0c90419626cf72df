"""Bound behaviour_weight, w = proximal / behaviour, and approximate the proximal policy without a forward pass.

The `metric` of a token is

    ratio  w            k1  log w            k2  (log w)^2 / 2            k3  w - 1 - log w

With `level: sequence`, the metric is the mean, sum or maximum over the tokens in the loss; for `ratio` these are taken
of log w, so the mean is geometric. With `level: sequence` and `metric: ratio`, w itself is the product (`sum`) or the
geometric mean (otherwise) and the same for all tokens of the sequence. The `rule` for tokens out of bounds: `mask`
removes them from the loss, `clamp` sets w to the bound, `none` keeps w. `ignore` sets every w to 1, so there is no
correction. Denominators do not change. Logs of w are clamped to [-20, 20], like all log ratios.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from areal_rloo.algorithm.kl import exp_limited, kl_estimate
from areal_rloo.config import BehaviourWeightConfig


class BehaviourWeights(NamedTuple):
    """All [num_tokens], without gradient; `TokenOutcomes` describes them."""

    weight: Tensor
    log: Tensor  # log w before the rule, not limited
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
        judged = of_sequences(judged, in_loss, sequence_index, rule.aggregate)
        if rule.metric == "ratio":
            own = of_sequences(log_weight, in_loss, sequence_index, "sum" if rule.aggregate == "sum" else "mean")
    unbounded = exp_limited(own)
    if rule.metric == "ratio":
        judged = exp_limited(judged)
    nothing = torch.zeros_like(in_loss)
    lower = (0.0 if rule.metric == "ratio" else -math.inf) if rule.lower is None else rule.lower
    upper = math.inf if rule.upper is None else rule.upper
    outside = (judged > upper) | (judged < lower)
    if rule.rule == "mask":
        return BehaviourWeights(torch.where(outside, 0.0, unbounded), own, nothing, outside & in_loss)
    if rule.rule == "clamp":
        weight = torch.where(outside, unbounded.clamp(lower, upper), unbounded)
        return BehaviourWeights(weight, own, (weight != unbounded) & in_loss, nothing)
    return BehaviourWeights(unbounded, own, nothing, nothing)


def interpolated_proximal(
    behaviour_logprobs: Tensor, current_logprobs: Tensor, staleness: Tensor, *, progress: float
) -> Tensor:
    """Approximate proximal logprobs without a forward pass: log-linear between behaviour and current policy.

        log proximal = log behaviour + s / (s + progress) (log current - log behaviour)

    A token of version v - s is s versions older than the proximal policy v, and the current policy is on the way to
    version v + 1: `progress` in (0, 1] is the share of the step's minibatches that it has been trained on. For a fresh
    token (s = 0) the behaviour policy is the proximal policy, and the result is exact.

    All are [num_tokens]: logprobs and result float, the result without gradient; staleness int.
    """
    share = staleness / (staleness + progress)
    return behaviour_logprobs + share * (current_logprobs.detach() - behaviour_logprobs)


def of_sequences(values: Tensor, in_loss: Tensor, sequence_index: Tensor, how: str) -> Tensor:
    """Replace each value by the `sum`, `mean` or `max` over the tokens in the loss of the same sequence.

    All are [num_tokens]: values and result float, in_loss bool, sequence_index int64. `values` must be 0 outside the
    loss. A sequence without a token in the loss gives 0.
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
