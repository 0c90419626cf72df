"""Measure the health of a train step from the outcomes of the tokens.

In: the outcomes of all tokens in the loss, of trajectories with a gradient. Out: means, shares and divergences by field
of `TrainRecord` (`areal_rloo.telemetry.records`), which defines each field. KLs are in nats a token. A number is NaN if
the loss does not have it, or if it needs values which were not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.loss import TokenOutcomes


def diagnose(minibatches: Sequence[Sequence[TokenOutcomes]]) -> dict[str, Any]:
    """Measure a step from the outcomes of the microbatches of each minibatch; NaN without a token in the loss."""
    tokens = TokenOutcomes.joined([outcomes for minibatch in minibatches for outcomes in minibatch])
    behaviour, proximal, current = (values.double() for values in tokens[:3])  # a small k3 is a difference
    behaviour_k3 = kl_estimate(behaviour, current, "k3")
    first = TokenOutcomes.joined(minibatches[0])  # fresh tokens have the version of the proximal policy only there
    mismatch = (first.behaviour_logprobs - first.proximal_logprobs).abs()[first.staleness == 0]
    return {
        "entropy": _mean(tokens.entropy),
        "ratio_mean": _mean(tokens.ratio),
        "ratio_max": _max(tokens.ratio),
        "ratio_clipped_share": _mean(tokens.ratio_clipped),
        "ratio_limited_share": _mean(tokens.ratio_limited),
        "behaviour_weight_mean": _mean(tokens.behaviour_weight),
        "behaviour_weight_max": _max(tokens.behaviour_weight_unbounded),
        "behaviour_weight_clamped_share": _mean(tokens.behaviour_weight_clamped),
        "behaviour_weight_masked_share": _mean(tokens.behaviour_weight_masked),
        "effective_sample_share": _effective_share(current - behaviour),
        "behaviour_kl_k1": _mean(kl_estimate(behaviour, current, "k1")),
        "behaviour_kl_k3": _mean(behaviour_k3),
        "behaviour_kl_by_staleness": {
            int(value): _mean(behaviour_k3[tokens.staleness == value]) for value in tokens.staleness.unique()
        },
        "proximal_kl_k1": _mean(kl_estimate(proximal, current, "k1")),
        "proximal_kl_k3": _mean(kl_estimate(proximal, current, "k3")),
        "mismatch_abs_mean": _mean(mismatch),
        "mismatch_max": _max(mismatch),
    }


def _effective_share(log_ratio: Tensor) -> float:
    """Return (sum u)^2 / (n sum u^2) of u = current / behaviour, from log u, [num_tokens] float64."""
    if len(log_ratio) == 0:
        return math.nan
    ratio = torch.exp(log_ratio - log_ratio.max())  # a factor of all u does not matter
    return float(ratio.sum()) ** 2 / (len(ratio) * float(ratio.square().sum()))


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _max(values: Tensor) -> float:
    return float(values.max()) if len(values) else math.nan
