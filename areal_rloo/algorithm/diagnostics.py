"""Measure the health of a train step from the outcomes of the tokens.

    outcomes of a minibatch on a rank ─► sums, a few numbers (`measure`)
    sums of all ranks and minibatches ─► numbers of the step (`diagnose`)

In: the outcomes of all tokens in the loss, of trajectories with a gradient. Out: means, shares and divergences by field
of `TrainRecord` (`areal_rloo.telemetry.records`), which defines each field. KLs are in nats a token. A number is NaN if
the loss does not have it, or if it needs values which were not computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.loss import TokenOutcomes


class Sum(msgspec.Struct, frozen=True, array_like=True):
    """Number, sum and largest of values."""

    num: int
    total: float
    largest: float  # -inf without values

    @classmethod
    def joined(cls, parts: Sequence[Sum]) -> Sum:
        largest = float(np.max([part.largest for part in parts], initial=-math.inf))  # unlike max, NaN stays
        return cls(sum(part.num for part in parts), sum(part.total for part in parts), largest)

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else math.nan

    @property
    def maximum(self) -> float:
        return self.largest if self.num else math.nan


class Sums(msgspec.Struct, frozen=True):
    """Sums over the tokens of a minibatch on a rank; they add up over ranks and minibatches."""

    of_tokens: dict[str, Sum]  # by outcome or divergence
    k3_by_staleness: dict[int, Sum]  # of the behaviour policy to the current policy, by staleness in versions
    log_ratios: tuple[float, float]  # log sum u and log sum u^2 of u = current / behaviour; -inf without tokens


def measure(tokens: TokenOutcomes) -> Sums:
    """Sum up the outcomes of tokens in float64, on the device of the tokens."""
    behaviour, proximal, current = (values.double() for values in tokens[:3])  # a small k3 is a difference
    behaviour_k3 = kl_estimate(behaviour, current, "k3")
    mismatch = (tokens.behaviour_logprobs - tokens.proximal_logprobs).abs()[tokens.staleness == 0]
    values = {
        **tokens._asdict(),
        "behaviour_k1": kl_estimate(behaviour, current, "k1"),
        "behaviour_k3": behaviour_k3,
        "proximal_k1": kl_estimate(proximal, current, "k1"),
        "proximal_k3": kl_estimate(proximal, current, "k3"),
        "mismatch": mismatch,
    }
    present = tokens.staleness.unique().tolist()
    by_staleness = _summed([behaviour_k3[tokens.staleness == value] for value in present])
    log_ratio = current - behaviour
    logs = torch.stack([log_ratio.logsumexp(0), (2 * log_ratio).logsumexp(0)]).tolist()
    return Sums(
        of_tokens=dict(zip(values, _summed(list(values.values())), strict=True)),
        k3_by_staleness=dict(zip(present, by_staleness, strict=True)),
        log_ratios=(logs[0], logs[1]),
    )


def diagnose(minibatches: Sequence[Sequence[Sums]]) -> dict[str, Any]:
    """Give the numbers of a step from the sums of each minibatch, by rank; NaN without a token in the loss."""
    parts = list(chain(*minibatches))
    over = {name: Sum.joined([part.of_tokens[name] for part in parts]) for name in parts[0].of_tokens}
    # Fresh tokens have the version of the proximal policy only in the first minibatch.
    mismatch = Sum.joined([part.of_tokens["mismatch"] for part in minibatches[0]])
    present = sorted(set(chain(*(part.k3_by_staleness for part in parts))))
    by_staleness = {
        value: Sum.joined([part.k3_by_staleness[value] for part in parts if value in part.k3_by_staleness])
        for value in present
    }
    return {
        "entropy": over["entropy"].mean,
        "ratio_mean": over["ratio"].mean,
        "ratio_max": over["ratio"].maximum,
        "ratio_clipped_share": over["ratio_clipped"].mean,
        "ratio_limited_share": over["ratio_limited"].mean,
        "behaviour_weight_mean": over["behaviour_weight"].mean,
        "behaviour_weight_max": over["behaviour_weight_unbounded"].maximum,
        "behaviour_weight_clamped_share": over["behaviour_weight_clamped"].mean,
        "behaviour_weight_masked_share": over["behaviour_weight_masked"].mean,
        "effective_sample_share": _effective_share(parts, over["entropy"].num),
        "behaviour_kl_k1": over["behaviour_k1"].mean,
        "behaviour_kl_k3": over["behaviour_k3"].mean,
        "behaviour_kl_by_staleness": {value: total.mean for value, total in by_staleness.items()},
        "proximal_kl_k1": over["proximal_k1"].mean,
        "proximal_kl_k3": over["proximal_k3"].mean,
        "mismatch_abs_mean": mismatch.mean,
        "mismatch_max": mismatch.maximum,
    }


def _effective_share(parts: Sequence[Sums], num_tokens: int) -> float:
    """Return (sum u)^2 / (n sum u^2) of u = current / behaviour; in logs, because u may be as large as 1e300."""
    if num_tokens == 0:
        return math.nan
    log_sum, log_squares = torch.tensor([part.log_ratios for part in parts], dtype=torch.float64).logsumexp(0)
    return float(torch.exp(2 * log_sum - log_squares)) / num_tokens


def _summed(values: Sequence[Tensor]) -> list[Sum]:
    """Sum up each tensor; the numbers leave the device together."""
    if not values:
        return []
    nothing = values[0].new_full((), -math.inf, dtype=torch.float64)
    totals = torch.stack([each.double().sum() for each in values]).tolist()
    largest = torch.stack([each.max().double() if len(each) else nothing for each in values]).tolist()
    return [Sum(len(each), *numbers) for each, *numbers in zip(values, totals, largest, strict=True)]


def describe_advantages(advantages: Tensor, counts: Tensor) -> dict[str, float]:
    """Describe advantages by field of `TrainRecord`.

    Both are [num]: an advantage counts for so many tokens in the loss.
    """
    counted = counts > 0
    values = advantages[counted].double() if counted.any() else torch.tensor([math.nan])
    shares = counts[counted].double() / counts.sum() if counted.any() else torch.ones(1)
    mean = (values * shares).sum()
    return {
        "advantage_mean": float(mean),
        "advantage_std": float(((values - mean).square() * shares).sum().sqrt()),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_abs_mean": float((values.abs() * shares).sum()),
    }


def describe_tokens(num_by_staleness: Mapping[int, int], num_stale: int, num_truncated: int) -> dict[str, Any]:
    """Count the tokens of a batch by field of `TrainRecord`.

    The tokens in the loss are given by staleness; the others are past the bound, or of a truncated sample.
    """
    num_in_loss = sum(num_by_staleness.values())
    num_all = num_in_loss + num_stale + num_truncated
    return {
        "policy_tokens": num_all,
        "trained_tokens": num_in_loss,
        "staleness_mean": sum(s * n for s, n in num_by_staleness.items()) / max(1, num_in_loss),
        "staleness_max": max(num_by_staleness, default=0),
        "staleness_tokens": dict(num_by_staleness),
        "masked_token_share": num_stale / max(1, num_all),
        "truncated_token_share": num_truncated / max(1, num_all),
    }
