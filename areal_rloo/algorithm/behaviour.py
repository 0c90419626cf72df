"""The behaviour_weight of each token, and what becomes of one past a bound.

In: log w = log proximal - log behaviour of the tokens of whole sequences. Out: w as the loss uses it, and which tokens
the rule touched. `metric` says what the bounds are on:

    ratio  w            k1  log w            k2  (log w)^2 / 2            k3  w - 1 - log w

by token, or of a sequence: the mean, sum or largest over its tokens in the loss, of log w for `ratio` (the mean is then
the geometric one) and of the metric itself otherwise. With `level: sequence` and `metric: ratio` the weight is the
sequence's as well: the product for `sum`, else the geometric mean, the same for all its tokens. `mask` takes what is
out of bounds out of the loss; `clamp` sets the weight to the bound; `none` leaves it; `ignore` takes every weight as 1,
which corrects nothing. Denominators stay as they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal_rloo.algorithm.kl import LOG_LIMIT, kl_estimate
from areal_rloo.config import BehaviourWeightConfig


@dataclass(frozen=True, slots=True)
class BehaviourWeights:
    """All [num_tokens], without gradient.

    Attributes:
        weight: what the loss of a token is multiplied with; 0 where masked.
        unbounded: the weight before the rule.
        clamped, masked: bool, what the rule did.
    """

    weight: Tensor
    unbounded: Tensor
    clamped: Tensor
    masked: Tensor


def behaviour_weights(
    log_weight: Tensor, in_loss: Tensor, sequence_index: Tensor, rule: BehaviourWeightConfig
) -> BehaviourWeights:
    """Apply a rule to the weights of one microbatch.

    Args:
        log_weight: [num_tokens] float, log proximal - log behaviour; finite where `in_loss`, 0 elsewhere.
        in_loss: [num_tokens] bool.
        sequence_index: [num_tokens] int64, which sequence a token belongs to; whole sequences, numbered from 0.
        rule: what is bounded, and what follows.
    """
    log_weight = torch.zeros_like(log_weight) if rule.rule == "ignore" else log_weight.detach()
    by_sequence = rule.level == "sequence" and len(log_weight) > 0
    own = log_weight
    if by_sequence and rule.metric == "ratio":
        own = _aggregate(log_weight, in_loss, sequence_index, "sum" if rule.aggregate == "sum" else "mean")
    unbounded = _exp(own)
    judged = _metric(log_weight, rule.metric)
    if by_sequence:
        judged = _aggregate(judged, in_loss, sequence_index, rule.aggregate)
    if rule.metric == "ratio":
        judged = _exp(judged)
    nothing = torch.zeros_like(in_loss)
    lower, upper = _bounds(rule)
    outside = (judged > upper) | (judged < lower)
    if rule.rule == "mask":
        return BehaviourWeights(torch.where(outside, 0.0, unbounded), unbounded, nothing, outside & in_loss)
    if rule.rule == "clamp":
        weight = torch.where(outside, unbounded.clamp(lower, upper), unbounded)
        return BehaviourWeights(weight, unbounded, (weight != unbounded) & in_loss, nothing)
    return BehaviourWeights(unbounded, unbounded, nothing, nothing)


def interpolated_proximal(behaviour_logprobs: Tensor, current_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Proximal logprobs without a forward pass: log-linear between the policies before and after them.

        log proximal = log behaviour + s / (s + 1) (log current - log behaviour)

    A token of version v - s lies s versions before the proximal policy v, which lies one before what the step makes of
    the current one. A fresh token (s = 0) has its behaviour policy as the proximal one, which is exact.

    Args:
        behaviour_logprobs, current_logprobs: [num_tokens] float.
        staleness: [num_tokens] int64, s.

    Returns:
        [num_tokens] float, without gradient.
    """
    share = staleness.to(current_logprobs.dtype) / (staleness + 1)
    return behaviour_logprobs + share * (current_logprobs.detach() - behaviour_logprobs)


def of_sequences(values: Tensor, in_loss: Tensor, sequence_index: Tensor, how: str) -> Tensor:
    """Sum or mean over the tokens in the loss of each sequence, spread over them again.

    Args:
        values: [num_tokens] float, 0 where not `in_loss`.
        in_loss: [num_tokens] bool.
        sequence_index: [num_tokens] int64.
        how: `sum` or `mean`; 0 for a sequence without a token in the loss.

    Returns:
        [num_tokens] float.
    """
    zeros = values.new_zeros(int(sequence_index.max()) + 1)
    total = zeros.scatter_add(0, sequence_index, values)
    if how == "mean":
        total = total / zeros.scatter_add(0, sequence_index, in_loss.to(values.dtype)).clamp(min=1)
    return total[sequence_index]


def _aggregate(values: Tensor, in_loss: Tensor, sequence_index: Tensor, how: str) -> Tensor:
    values = torch.where(in_loss, values, 0.0)
    if how != "max":
        return of_sequences(values, in_loss, sequence_index, how)
    least = values.new_full((int(sequence_index.max()) + 1,), -torch.inf)
    largest = least.scatter_reduce(0, sequence_index, torch.where(in_loss, values, -torch.inf), "amax")
    return torch.where(largest > -torch.inf, largest, 0.0)[sequence_index]


def _metric(log_weight: Tensor, metric: Literal["ratio", "k1", "k2", "k3"]) -> Tensor:
    """By token: k2 and k3 are the estimates of KL(behaviour, proximal), k1 and `ratio` stand as log w, to be summed."""
    if metric in ("k2", "k3"):
        return kl_estimate(torch.zeros_like(log_weight), log_weight, metric)
    return log_weight


def _bounds(rule: BehaviourWeightConfig) -> tuple[float, float]:
    lowest = 0.0 if rule.metric == "ratio" else -math.inf
    return lowest if rule.lower is None else rule.lower, math.inf if rule.upper is None else rule.upper


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT))
