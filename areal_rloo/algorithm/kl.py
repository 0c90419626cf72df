"""Estimators of a KL divergence from sampled tokens (J. Schulman, "Approximating KL divergence", 2020).

In: logprobs of the same tokens under the policy that sampled them and under another. Out: a number a token.

With d = log p - log q of a token sampled from p:

    k1   d                  unbiased, of either sign
    k2   d^2 / 2            biased, of low variance
    k3   exp(-d) - 1 + d    unbiased, never negative
    abs  |d|

In a loss, where p is differentiated and the token is not sampled anew, the expected gradient of k2 is that of KL(p, q),
of k3 that of KL(q, p), and of k1 nothing at all.

A controller may steer the coefficient beta of a KL term towards a target (arXiv:1909.08593, section 2.2): after a step
on n trajectories with a measured divergence D,

    beta <- beta (1 + clip(D / target - 1, -0.2, 0.2) n / horizon)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from areal_rloo.config import AdaptiveKLConfig

Estimator = Literal["k1", "k2", "k3", "abs"]

LOG_LIMIT = 20.0  # of log ratios: e^20 squares without overflow, and no ratio that large has a meaning of its own


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """KL(p, q) by token.

    Args:
        logprobs: [num_tokens] float, under p.
        other_logprobs: [num_tokens] float, under q.
        estimator: which of the four.

    Returns:
        [num_tokens] float; finite for finite logprobs.
    """
    difference = logprobs - other_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.exp((-difference).clamp(max=LOG_LIMIT)) - 1 + difference
        case "abs":
            return difference.abs()


def adapted_coefficient(
    coefficient: float, *, divergence: float, num_trajectories: int, config: AdaptiveKLConfig
) -> float:
    """The coefficient after a step, by the equation above; never negative, and as it was for a divergence of NaN.

    Args:
        coefficient: beta.
        divergence: D, mean over completion tokens of the configured estimator, nats.
        num_trajectories: n, of the step.
        config: target and horizon.
    """
    if math.isnan(divergence):
        return coefficient
    error = min(0.2, max(-0.2, divergence / config.target - 1))
    return coefficient * max(0.0, 1 + error * num_trajectories / config.horizon)
