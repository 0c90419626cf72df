"""Compute the policy loss of a microbatch, and the token weights that turn a sum over tokens into a mean.

Takes the logprobs of the same tokens under three policies, advantages and token weights. Returns a scalar to
differentiate and the outcome of each token for the metrics. The denominator of a minibatch is in the token weights, so
the losses of microbatches add up.

    L = - sum_t c_t (w_t f(rho_t, A_t) + entropy_coefficient H_t - beta v_t D_t)

w = proximal / behaviour, without gradient (arXiv:2110.00641, 2505.24298). c_t is the share of the token in the chosen
mean (`sample_weights`), H_t the entropy of the policy at the token, beta v_t D_t the KL term (`KLTerm`). f, by `kind`:

    ppo        min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); if A < 0, at least `dual_clip` A
               (arXiv:1707.06347, 1912.09729)
    cispo      clip(rho, 1 - eps_low, 1 + eps_high) A log current, without gradient through rho  (arXiv:2506.13585)
    reinforce  A log current
    or minus the loss that a function of the user gives the token (`areal_rloo.algorithm.own_parts`)

rho, by `ratio_level`, over the tokens in the loss of a sequence:

    token          current / proximal
    sequence_mean  their geometric mean, the same for all tokens of the sequence  (GSPO, arXiv:2507.18071)
    sequence_sum   their product, likewise  (RLOO as in TRL)

The ratio of a sequence has a gradient token by token (GSPO-token, same paper): rho_t = sg(rho) (current_t /
sg(current_t))^m, with m = 1 for the mean and m = number of tokens for the product. If weight and advantage are the same
for all tokens of the sequence, the sum is the gradient of rho. Otherwise weights and advantages differ by token.

With `decoupled: false` the behaviour policy replaces the proximal policy, so w = 1. Log ratios are clamped to
[-20, 20], so every finite input has a finite loss and gradient. The entropy term has no w.

`areal_rloo.algorithm.behaviour_weight` bounds w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_rloo.algorithm.behaviour_weight import behaviour_weights, of_sequences
from areal_rloo.algorithm.kl import LOG_LIMIT, KLTerm, exp_limited
from areal_rloo.algorithm.own_parts import OwnLoss
from areal_rloo.config import LossConfig


class TokenOutcomes(NamedTuple):
    """Outcomes of the tokens in the loss of a microbatch; all [num_tokens_in_loss], without gradient.

    A number that the loss does not have is NaN: the ratio of `kind: reinforce`, w if there is no correction.
    """

    behaviour_logprobs: Tensor  # float, like the next two
    proximal_logprobs: Tensor  # NaN if they were not computed
    current_logprobs: Tensor
    entropy: Tensor  # float, of the current policy at the token
    ratio: Tensor  # float, rho
    ratio_clipped: Tensor  # bool, the clip decided the loss of the token
    ratio_limited: Tensor  # bool, a log of a ratio in the loss is beyond 20: rho or w, of a token or a sequence
    behaviour_weight: Tensor  # float, w as used in the loss; 0 if masked
    behaviour_weight_unbounded: Tensor  # float, w before the rule
    behaviour_weight_clamped: Tensor  # bool, the effect of the rule
    behaviour_weight_masked: Tensor  # bool, likewise
    staleness: Tensor  # int, in versions

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
    kl: KLTerm | None = None,
    own: OwnLoss | None = None,
) -> LossOutput:
    """Compute the loss of a microbatch by the equation above.

    All tensors are [num_tokens]; staleness is int, sequence_index int64, the others float. Only the current logprobs,
    and with an `entropy_coefficient` the entropies, have a gradient. A token weight of 0 removes a token from loss and
    metrics, whatever the logprobs are. `sequence_index` numbers the sequences of the tokens from 0; all are whole.
    `own` is the function of a `kind` that is not built in.
    """
    in_loss = token_weights != 0
    current = torch.where(in_loss, current_logprobs, 0.0)
    behaviour = torch.where(in_loss, behaviour_logprobs, 0.0)
    proximal = torch.where(in_loss, proximal_logprobs, 0.0).detach()
    anchor = proximal if config.decoupled else behaviour
    log_ratio = _at_level(current - anchor, in_loss, sequence_index, config)
    ratio = exp_limited(log_ratio)
    if own is None:
        objective, clip_decides = _objective(ratio, current, advantages, config)
    else:
        logprobs = {"current_logprobs": current, "proximal_logprobs": anchor, "behaviour_logprobs": behaviour}
        objective = torch.where(in_loss, -own(**logprobs, advantages=advantages, config=config), 0.0)
        clip_decides = torch.zeros_like(in_loss)
    correction = behaviour_weights(anchor - behaviour, in_loss, sequence_index, config.behaviour_weight)
    objective = correction.weight * objective
    if config.entropy_coefficient != 0:
        objective = objective + config.entropy_coefficient * torch.where(in_loss, entropy, 0.0)
    if kl is not None:
        objective = objective - torch.where(in_loss, kl.penalty(current, current - anchor, correction.weight), 0.0)
    logs = [correction.log] if config.kind == "reinforce" else [correction.log, log_ratio]
    logs += [] if kl is None or kl.config.correction == "none" else [current - anchor]
    nothing = torch.full_like(ratio, math.nan)
    has_weight = config.decoupled and config.behaviour_weight.rule != "ignore"
    outcomes = TokenOutcomes(
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        current_logprobs=current,
        entropy=entropy,
        ratio=nothing if config.kind == "reinforce" else ratio,
        ratio_clipped=clip_decides,
        ratio_limited=(torch.stack(logs).abs() > LOG_LIMIT).any(dim=0),
        behaviour_weight=correction.weight if has_weight else nothing,
        behaviour_weight_unbounded=exp_limited(correction.log) if has_weight else nothing,
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
        return of_sequences(value, in_loss, sequence_index, "mean") + own
    num_tokens = of_sequences(in_loss.to(value.dtype), in_loss, sequence_index, "sum")
    return of_sequences(value, in_loss, sequence_index, "sum") + num_tokens * own


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
        case _:
            return advantages * current, torch.zeros_like(ratio, dtype=torch.bool)


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


def sample_weights(num_in_loss: Tensor, *, max_new_tokens: int, config: LossConfig) -> Tensor:
    """Return the share of a token in the mean of the minibatch, by sample: [num_samples] float64.

        token_mean               1 / N                 N tokens in the loss
        seq_mean_token_mean      1 / (S n_s)           S samples with a token in the loss, n_s tokens in sample s
        seq_mean_token_sum       1 / S
        seq_mean_token_sum_norm  1 / (S max_new_tokens)         (Dr. GRPO, arXiv:2503.20783)

    With `count_masked`, S counts all samples. A sample counts once, however many trajectories it has. `num_in_loss` is
    n_s of all samples of the minibatch, [num_samples]. Tokens outside the loss have no share; with the first two kinds
    the other tokens sum to 1 if S counts no sample without a token in the loss.
    """
    tokens = num_in_loss.double()
    num_samples = len(tokens) if config.count_masked else max(1, int((tokens > 0).sum()))
    match config.aggregation:
        case "token_mean":
            per_token = tokens.sum().clamp(min=1).expand(len(tokens))
        case "seq_mean_token_mean":
            per_token = num_samples * tokens.clamp(min=1)
        case "seq_mean_token_sum":
            per_token = torch.full_like(tokens, num_samples)
        case "seq_mean_token_sum_norm":
            per_token = torch.full_like(tokens, num_samples * max_new_tokens)
    return 1 / per_token
