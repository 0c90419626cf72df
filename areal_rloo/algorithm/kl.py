"""Estimators of a KL divergence from sampled tokens (J. Schulman, "Approximating KL divergence", 2020).

In: logprobs of the same tokens under the policy that sampled them and under another. Out: a number a token.

With d = log p - log q of a token sampled from p:

    k1   d                  unbiased, of either sign
    k2   d^2 / 2            biased, of low variance; its gradient is the divergence's
    k3   exp(-d) - 1 + d    unbiased, never negative
    abs  |d|
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs"]

_LOG_LIMIT = 20.0  # of -d in k3: e^20 is far beyond any divergence with a meaning, and finite


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
            return torch.exp((-difference).clamp(max=_LOG_LIMIT)) - 1 + difference
        case "abs":
            return difference.abs()
