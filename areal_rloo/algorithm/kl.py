"""Estimate KL divergences from sampled tokens (J. Schulman, "Approximating KL divergence", 2020).

Takes logprobs of the same tokens under the policy that sampled them (p) and under another (q); returns a number per
token. With d = log p - log q of a token sampled from p:

    k1   d                  unbiased, of either sign
    k2   d^2 / 2            biased, of low variance
    k3   exp(-d) - 1 + d    unbiased, never negative
    abs  |d|

In a loss, p is differentiated but the token is not sampled again. The expected gradient of k2 is then the gradient of
KL(p, q), that of k3 the gradient of KL(q, p), and that of k1 is zero. If an older policy sampled the token, the term of
the loss is beta v D with a weight v = p / older, by `kl.correction`:

    weight    without a gradient: the expected gradients are those above
    gradient  with a gradient of p: those of k1 and k3 are the gradient of KL(p, q)  (DeepSeek-V3.2, arXiv:2512.02556)
    none      v = 1, as in GRPO: the expected gradients are those above for fresh tokens alone

A controller may steer the coefficient beta of a KL term towards a target (arXiv:1909.08593, section 2.2). After a step
on n trajectories with a measured divergence D:

    beta <- beta (1 + clip(D / target - 1, -0.2, 0.2) n / horizon)
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from areal_rloo.config import AdaptiveKLConfig, KLConfig

Estimator = Literal["k1", "k2", "k3", "abs"]

LOG_LIMIT = 20.0  # of log ratios: the square of e^20 does not overflow, and larger ratios carry no information


def kl_estimate(logprobs: Tensor, other_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(p, q) by a formula above, finite for finite logprobs under p and q, all [num_tokens] float."""
    difference = logprobs - other_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1((-difference).clamp(max=LOG_LIMIT)) + difference  # exp - 1 cancels for small d
        case "abs":
            return difference.abs()


def exp_limited(log_ratio: Tensor) -> Tensor:
    """Return a ratio between e^-20 and e^20."""
    return torch.exp(log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT))


class KLTerm(NamedTuple):
    """The KL term of a loss."""

    reference_logprobs: Tensor  # log q, [num_tokens] float
    coefficient: float  # beta
    config: KLConfig

    def penalty(self, logprobs: Tensor, log_ratio: Tensor, behaviour_weight: Tensor) -> Tensor:
        """Return beta v D, with v = w rho: current / proximal times proximal / behaviour, which a rule has bounded.

        All are [num_tokens] float: log p, log rho of each token with the gradient of log p, and w without a gradient.
        """
        divergence = self.coefficient * kl_estimate(logprobs, self.reference_logprobs, self.config.estimator)
        if self.config.correction == "none":
            return divergence
        log_ratio = log_ratio if self.config.correction == "gradient" else log_ratio.detach()
        return behaviour_weight * exp_limited(log_ratio) * divergence


def adapted_coefficient(
    coefficient: float, *, divergence: float, num_trajectories: int, config: AdaptiveKLConfig
) -> float:
    """Return beta after a step, by the equation above; never negative, unchanged if the divergence is NaN.

    The divergence is D, the mean over completion tokens of the configured estimator, nats; n is num_trajectories.
    """
    if math.isnan(divergence):
        return coefficient
    error = min(0.2, max(-0.2, divergence / config.target - 1))
    return coefficient * max(0.0, 1 + error * num_trajectories / config.horizon)
