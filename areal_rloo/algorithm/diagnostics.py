"""What the tokens of a train step say about its health: one number each, for metrics and records.

In: the outcomes of all tokens in the loss of trajectories with a gradient. Out: means, shares, divergences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.loss import TokenOutcomes


@dataclass(frozen=True, slots=True)
class PolicyDiagnostics:
    """Of one train step; means and shares are over tokens with a gradient unless said otherwise, KLs in nats a token.

    Attributes:
        entropy: mean entropy of the current policy where it sampled a token, over the whole vocabulary.
        ratio_mean, ratio_max: current / proximal, at the level the loss uses.
        ratio_clipped_share: where the clip decided the loss.
        ratio_limited_share: a log ratio, or a log behaviour_weight, beyond 20.
        behaviour_weight_mean: proximal / behaviour, as the loss used it.
        behaviour_weight_max: before its rule.
        behaviour_weight_clamped_share, behaviour_weight_masked_share: what the rule set to its bound, or took out.
        effective_sample_share: (sum w)^2 / (n sum w^2) of the n behaviour_weights; 1 where all are equal.
        behaviour_kl_k1, behaviour_kl_k3: KL(behaviour, current).
        behaviour_kl_by_staleness: KL(behaviour, current) by k3, by staleness in versions.
        proximal_kl_k1, proximal_kl_k3: of the proximal to the current policy, on the behaviour policy's tokens.
        mismatch_abs_mean, mismatch_max: |log behaviour - log proximal| of tokens without staleness, first minibatch:
            what the engine and the learner disagree about on the same weights. NaN where there is no such token.
    """

    entropy: float = math.nan
    ratio_mean: float = math.nan
    ratio_max: float = math.nan
    ratio_clipped_share: float = math.nan
    ratio_limited_share: float = math.nan
    behaviour_weight_mean: float = math.nan
    behaviour_weight_max: float = math.nan
    behaviour_weight_clamped_share: float = math.nan
    behaviour_weight_masked_share: float = math.nan
    effective_sample_share: float = math.nan
    behaviour_kl_k1: float = math.nan
    behaviour_kl_k3: float = math.nan
    behaviour_kl_by_staleness: dict[int, float] = field(default_factory=dict)
    proximal_kl_k1: float = math.nan
    proximal_kl_k3: float = math.nan
    mismatch_abs_mean: float = math.nan
    mismatch_max: float = math.nan


def diagnose(minibatches: Sequence[Sequence[TokenOutcomes]]) -> PolicyDiagnostics:
    """The numbers above, from the outcomes of the microbatches of each minibatch; NaN without a token in the loss."""
    everything = [outcomes for minibatch in minibatches for outcomes in minibatch]
    if sum(len(outcomes.ratio) for outcomes in everything) == 0:
        return PolicyDiagnostics()
    tokens = _joined(everything)
    weight = tokens.behaviour_weight
    behaviour_k3 = kl_estimate(tokens.behaviour_logprobs, tokens.current_logprobs, "k3")
    mismatch = _mismatch(minibatches[0])
    return PolicyDiagnostics(
        entropy=_mean(tokens.entropy),
        ratio_mean=_mean(tokens.ratio),
        ratio_max=float(tokens.ratio.max()),
        ratio_clipped_share=_mean(tokens.ratio_clipped),
        ratio_limited_share=_mean(tokens.ratio_limited),
        behaviour_weight_mean=_mean(weight),
        behaviour_weight_max=float(tokens.behaviour_weight_unbounded.max()),
        behaviour_weight_clamped_share=_mean(tokens.behaviour_weight_clamped),
        behaviour_weight_masked_share=_mean(tokens.behaviour_weight_masked),
        effective_sample_share=_effective_share(weight),
        behaviour_kl_k1=_mean(kl_estimate(tokens.behaviour_logprobs, tokens.current_logprobs, "k1")),
        behaviour_kl_k3=_mean(behaviour_k3),
        behaviour_kl_by_staleness={
            int(value): _mean(behaviour_k3[tokens.staleness == value]) for value in tokens.staleness.unique()
        },
        proximal_kl_k1=_mean(kl_estimate(tokens.proximal_logprobs, tokens.current_logprobs, "k1")),
        proximal_kl_k3=_mean(kl_estimate(tokens.proximal_logprobs, tokens.current_logprobs, "k3")),
        mismatch_abs_mean=_mean(mismatch) if len(mismatch) else math.nan,
        mismatch_max=float(mismatch.max()) if len(mismatch) else math.nan,
    )


def _mismatch(minibatch: Sequence[TokenOutcomes]) -> Tensor:
    """In the first minibatch proximal logprobs are of exactly the version that sampled a fresh token."""
    tokens = _joined(minibatch)
    return (tokens.behaviour_logprobs - tokens.proximal_logprobs).abs()[tokens.staleness == 0]


def _effective_share(weight: Tensor) -> float:
    weight = weight.double()
    squares = float(weight.square().sum())
    return float(weight.sum()) ** 2 / (len(weight) * squares) if squares > 0 else 0.0


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _joined(outcomes: Sequence[TokenOutcomes]) -> TokenOutcomes:
    return TokenOutcomes(
        **{name: torch.cat([getattr(one, name) for one in outcomes]) for name in TokenOutcomes.__dataclass_fields__}
    )
