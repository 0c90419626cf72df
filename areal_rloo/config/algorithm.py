"""The section `algorithm`: every option between a reward and the loss, and the checks between these options.

docs/algorithms.md has the equations, and the option names of AReaL, verl, TRL and ms-swift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from areal_rloo.config.section import (
    Finite,
    ManyCount,
    Natural,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)
from areal_rloo.errors import shown

_LOSSES = ("ppo", "cispo", "reinforce")
NormLevel = Literal["group", "batch", "none"]
_Published = Literal["rloo", "reinforce", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
_OfLibraries = Literal["rloo_areal", "rloo_verl", "rloo_trl", "rloo_ms_swift"]
PresetName = Literal[_Published, _OfLibraries]


class NormConfig(Section, frozen=True):
    """Centre and scale a scalar per trajectory or per token (see `areal_rloo.algorithm.normalization`)."""

    mean_level: NormLevel = "none"  # subtract the mean of the group or of the batch
    mean_leave1out: bool = False  # the mean of the others, without the value itself (RLOO)
    std_level: NormLevel = "none"  # divide by the standard deviation of the group or of the batch
    std_unbiased: bool = True  # divide squares by n - 1 instead of n
    over: Literal["trajectories", "tokens"] = "trajectories"  # tokens: weight a value by its tokens in the loss
    eps: NonNegative = 1e-6  # added to the standard deviation


class RewardsConfig(Section, frozen=True):
    """Shape a task's reward r before any norm: clip((r - penalties + bias) * scale)."""

    bias: Finite = 0.0  # added to the reward
    scale: Finite = 1.0  # factor on the reward, after the bias
    clip: tuple[Finite, Finite] | None = None  # lowest and highest shaped reward; null: no limit
    truncated_penalty: NonNegative = 0.0  # subtracted if the engine stopped at max_new_tokens
    missing_eos_penalty: NonNegative = 0.0  # subtracted if the last token is not a stop token; ignores finish_reason
    overlong_tokens: Natural = 0  # a penalty rises over the last n of max_new_tokens; 0: none
    overlong_penalty: NonNegative = 1.0  # the penalty of overlong_tokens at max_new_tokens
    mask_truncated: bool = False  # remove truncated completions from the loss, not from the group's mean


class BehaviourWeightConfig(Section, frozen=True):
    """Bound the behaviour_weight w (proximal / behaviour).

    The bounds apply to `metric`: w, k1 = log w, k2 = (log w)^2 / 2 or k3 = w - 1 - log w.
    """

    # Past a bound, mask removes a token from the loss and clamp sets w to the bound; none keeps w; ignore sets w = 1.
    rule: Literal["mask", "clamp", "none", "ignore"] = "clamp"
    level: Literal["token", "sequence"] = "token"  # weigh each token, or a sequence as a whole
    # The measure with the bounds: w itself, or an estimate of the divergence.
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    aggregate: Literal["mean", "sum", "max"] = "mean"  # over a sequence: log w for `ratio`, else the metric
    lower: Finite | None = None  # lowest metric; null: no bound
    upper: Finite | None = 5.0  # highest metric; null: no bound


class LossConfig(Section, frozen=True):
    """The loss of each token and the mean over tokens (see `areal_rloo.algorithm.loss`)."""

    # `ppo` clips the ratio, cispo clips the weight and keeps the gradient, reinforce has no ratio. Or a function of
    # yours that gives the loss of each token: module:function or file.py:function.
    kind: str = "ppo"
    ratio_level: Literal["token", "sequence_mean", "sequence_sum"] = "token"  # sequence: as in GSPO and TRL
    decoupled: bool = True  # false: clip against the behaviour policy, as in plain PPO
    proximal: Literal["recompute", "reuse", "interpolate"] = "recompute"  # logprobs after the first minibatch
    eps_low: NonNegative = 0.2  # the ratio is clipped below 1 - eps_low
    eps_high: NonNegative = 0.2  # the ratio is clipped above 1 + eps_high
    # Limit of a ratio with a negative advantage; null: no limit.
    dual_clip: Annotated[float, msgspec.Meta(gt=1)] | None = None
    behaviour_weight: BehaviourWeightConfig = BehaviourWeightConfig()
    # Mean over all tokens, or over sequences of their mean, sum, or sum over max_new_tokens
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    count_masked: bool = False  # true: means over sequences divide by all, also by those without a token in the loss
    entropy_coefficient: Finite = 0.0  # weight of the entropy bonus

    @property
    def recomputes(self) -> bool:
        """True if later minibatches need the logprobs of the policy at the start of the step."""
        return self.decoupled and self.proximal == "recompute"

    @property
    def built_in(self) -> bool:
        return self.kind in _LOSSES

    @property
    def of_tokens(self) -> bool:
        """True if the loss of a token depends on no other token's logprobs."""
        weight = self.behaviour_weight
        return self.ratio_level == "token" and (weight.level == "token" or weight.rule == "ignore")


class AdaptiveKLConfig(Section, frozen=True):
    """Adapt `kl.coefficient` to reach a target divergence (see `areal_rloo.algorithm.kl`)."""

    target: PositiveFloat = 0.1  # nats a token, by the estimator
    horizon: PositiveInt = 10000  # trajectories


class KLConfig(Section, frozen=True):
    """The divergence from the reference policy (see `areal_rloo.algorithm.kl`)."""

    coefficient: NonNegative = 0.0  # 0: no KL term, and no reference model is loaded
    placement: Literal["reward", "loss"] = "reward"  # reward: of the behaviour policy; loss: of the current
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"  # of the divergence of a token, from log(policy / reference)
    # In the loss, of stale tokens: times current / behaviour, without or with a gradient, or none as in GRPO.
    correction: Literal["weight", "gradient", "none"] = "weight"
    adaptive: AdaptiveKLConfig | None = None  # adapt the coefficient; null: constant


class AlgorithmConfig(Section, frozen=True):
    """Keys that the file leaves out come from the preset."""

    preset: PresetName = "rloo"  # an algorithm by name: the values of all keys of this section that the file leaves out
    group_size: ManyCount = 8  # completions of a prompt
    max_staleness: Natural = 2  # eta: a token older than so many versions has no gradient; 0 is synchronous
    # Generation runs ahead of the training by so many steps; a number above eta means eta. 1 hides the latency of even
    # rollouts. More helps if lengths differ by much or weights arrive late, and costs staleness.
    pipeline_depth: PositiveInt = 1
    # Of a sample past the bound: mask only the stale tokens, drop the sample, or let the learner wait for old samples.
    stale_tokens: Literal["mask", "drop", "wait"] = "mask"
    drop_groups_of_one: bool = True  # drop a group with a single sample left, which has no baseline
    min_reward_std: NonNegative = 0.0  # drop and replace groups whose rewards deviate less (dynamic sampling)
    # A function that takes a Group and returns True to keep it: module:function or file.py:function; null: none.
    group_filter: str | None = None
    # End the run if the two filters above refuse the groups of so many batches in place of one; 0: never.
    max_filtered_batches: Natural = 10
    rewards: RewardsConfig = RewardsConfig()
    reward_norm: NormConfig = NormConfig()
    returns: Literal["trajectory", "token"] = "trajectory"  # token: each token gets the sum of later rewards
    discount: Probability = 1.0  # for each token of distance; needs returns=token
    adv_norm: NormConfig = NormConfig(mean_level="group", mean_leave1out=True)
    # A function in place of adv_norm, from the rewards of a batch to an advantage for each sample: module:function or
    # file.py:function; null: none.
    advantages: str | None = None
    # A function that gives each sample a factor on its share of the loss: module:function or file.py:function; null: 1.
    sample_weights: str | None = None
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()

    @property
    def least_group(self) -> int:
        """Number of samples below which a group is dropped: a single sample has no baseline."""
        return 2 if self.drop_groups_of_one and self.group_size > 1 else 1


def algorithm_mistakes(algorithm: AlgorithmConfig, *, max_new_tokens: int) -> Iterator[str]:
    """Check dependent options; give the text of each error."""
    norms = {"reward_norm": algorithm.reward_norm}
    if algorithm.advantages is None:
        norms = {"adv_norm": algorithm.adv_norm, **norms}
    for name, norm in norms.items():
        yield from _norm_mistakes(f"algorithm.{name}", norm, algorithm.group_size)
    yield from _returns_mistakes(algorithm)
    yield from _rewards_mistakes(algorithm.rewards, max_new_tokens)
    yield from _loss_mistakes(algorithm.loss)
    yield from _behaviour_weight_mistakes(algorithm.loss.behaviour_weight)
    yield from _kl_mistakes(algorithm.kl)
    if algorithm.min_reward_std > 0 and algorithm.group_size == 1:
        yield (
            f"algorithm.min_reward_std: expected 0 with algorithm.group_size=1, got {algorithm.min_reward_std}; a "
            "single reward has no deviation, so every group would be dropped"
        )


def _norm_mistakes(key: str, norm: NormConfig, group_size: int) -> Iterator[str]:
    if norm.mean_level == "group" and group_size == 1:
        yield (
            f"algorithm.group_size: expected at least 2 with {key}.mean_level=group (RLOO, GRPO), got 1; a sample "
            "alone in its group has no baseline, so every advantage would be 0"
        )
    if not norm.mean_leave1out:
        return
    if norm.over == "tokens":
        yield (
            f"{key}.over: expected trajectories with mean_leave1out, got tokens; a leave-one-out mean weighted by "
            f"length is not RLOO; set {key}.over=trajectories"
        )
    if norm.mean_level == "none":
        yield (
            f"{key}.mean_leave1out: expected false with mean_level=none, got true; set {key}.mean_level=group, or "
            "mean_leave1out=false"
        )


def _returns_mistakes(algorithm: AlgorithmConfig) -> Iterator[str]:
    norm = algorithm.adv_norm
    if algorithm.advantages is not None and algorithm.returns == "token":
        yield (
            f"algorithm.returns: expected trajectory with algorithm.advantages={algorithm.advantages}, got token; the "
            "function gives an advantage for each sample; set algorithm.returns=trajectory"
        )
    if algorithm.returns == "trajectory":
        if algorithm.discount != 1:
            yield (
                f"algorithm.discount: expected 1 with algorithm.returns=trajectory, got {algorithm.discount}; "
                "set algorithm.returns=token to discount the returns of tokens"
            )
        return
    if norm.mean_leave1out:
        yield (
            "algorithm.returns: expected trajectory with algorithm.adv_norm.mean_leave1out, got token; use the "
            "leave-one-out mean before the returns: set algorithm.reward_norm={mean_level: group, mean_leave1out: "
            "true} and algorithm.adv_norm={mean_level: none, mean_leave1out: false}"
        )
    if norm.over != "tokens" and (norm.mean_level != "none" or norm.std_level != "none"):
        yield (
            f"algorithm.adv_norm.over: expected tokens with algorithm.returns=token, got {norm.over}; returns of "
            "tokens are normed over tokens"
        )


def _rewards_mistakes(rewards: RewardsConfig, max_new_tokens: int) -> Iterator[str]:
    if rewards.clip is not None and not rewards.clip[0] < rewards.clip[1]:
        yield f"algorithm.rewards.clip: expected [lowest, highest] in this order, got {list(rewards.clip)}"
    if rewards.overlong_penalty != RewardsConfig().overlong_penalty and rewards.overlong_tokens == 0:
        yield (
            f"algorithm.rewards.overlong_tokens: expected at least 1 with overlong_penalty={rewards.overlong_penalty}, "
            "got 0, with which nothing reads the penalty"
        )
    if rewards.overlong_tokens > max_new_tokens:
        yield (
            f"algorithm.rewards.overlong_tokens: expected at most rollout.sampling.max_new_tokens={max_new_tokens}, "
            f"got {rewards.overlong_tokens}"
        )


def _loss_mistakes(loss: LossConfig) -> Iterator[str]:
    key = "algorithm.loss"
    if not loss.built_in and ":" not in loss.kind:
        yield f"{key}.kind: expected one of {', '.join(_LOSSES)}, or file.py:function, got '{shown(loss.kind)}'"
    if not loss.built_in and loss.ratio_level != "token":
        yield (
            f"{key}.ratio_level: expected token with kind={loss.kind}, got {loss.ratio_level}; the function gives the "
            f"loss of each token alone; set {key}.ratio_level=token"
        )
    if loss.kind == "reinforce" and loss.ratio_level != "token":
        yield f"{key}.ratio_level: expected token with kind=reinforce, which has no ratio, got {loss.ratio_level}"
    if loss.kind in ("cispo", "reinforce") and loss.dual_clip is not None:
        yield f"{key}.dual_clip: expected null with kind={loss.kind}, got {loss.dual_clip}; only ppo has it"
    if loss.count_masked and loss.aggregation == "token_mean":
        yield (
            f"{key}.count_masked: expected false with aggregation=token_mean, which divides by tokens, got true; set "
            f"false, or set {key}.aggregation to a mean over sequences"
        )
    if loss.decoupled:
        return
    if loss.kind == "reinforce":
        yield (
            f"{key}.decoupled: expected true with kind=reinforce, got false; without a ratio to the behaviour policy "
            f"the loss ignores staleness; set {key}.behaviour_weight.rule=ignore if you want this"
        )
    if loss.proximal != "recompute":
        yield f"{key}.proximal: {loss.proximal} is read only with decoupled=true; leave it out"
    if loss.behaviour_weight != BehaviourWeightConfig():
        yield f"{key}.behaviour_weight: read only with decoupled=true, since w is 1 otherwise; leave it out"


def _kl_mistakes(kl: KLConfig) -> Iterator[str]:
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator == "k1" and kl.correction != "gradient":
        yield (
            "algorithm.kl.estimator: expected k2, k3 or abs with placement=loss, got k1; the expected gradient of k1 "
            "is 0; set k2 for the gradient of KL(current, reference), k3 as in GRPO, or kl.correction=gradient"
        )
    if kl.coefficient > 0 and kl.correction == "gradient" and kl.placement == "loss" and kl.estimator in ("k2", "abs"):
        yield (
            f"algorithm.kl.correction: expected weight or none with estimator={kl.estimator}, got gradient; the "
            "gradient of this estimator's mean is not the gradient of a KL; set algorithm.kl.correction=weight, or "
            "kl.estimator=k1 or k3"
        )
    if kl.correction != KLConfig().correction and kl.placement == "reward":
        yield f"algorithm.kl.correction: {kl.correction} is read only with placement=loss; leave it out"
    if kl.adaptive is not None and kl.coefficient == 0:
        yield (
            "algorithm.kl.coefficient: expected more than 0 with algorithm.kl.adaptive, got 0, which no factor can "
            "change; set an initial coefficient"
        )


def _behaviour_weight_mistakes(rule: BehaviourWeightConfig) -> Iterator[str]:
    key = "algorithm.loss.behaviour_weight"
    if rule.aggregate != "mean" and rule.level == "token":
        yield (
            f"{key}.aggregate: expected mean with level=token, got {rule.aggregate}; aggregation needs a sequence; "
            f"set {key}.level=sequence"
        )
    if rule.rule in ("none", "ignore"):
        return
    if rule.upper is None and rule.lower is None:
        yield f"{key}.upper: expected a bound with rule={rule.rule}, got none; set it, or {key}.rule=none"
    lower = -math.inf if rule.lower is None else rule.lower
    upper = math.inf if rule.upper is None else rule.upper
    if lower > upper:
        yield f"{key}.lower: expected at most upper={upper}, got {lower}"
    if rule.metric in ("ratio", "k2", "k3") and upper <= 0:
        yield f"{key}.upper: expected more than 0 with metric={rule.metric}, got {upper}"
    if rule.rule == "clamp" and rule.metric != "ratio":
        yield (
            f"{key}.metric: expected ratio with rule=clamp, got {rule.metric}; a weight cannot be clamped to a bound "
            "on a divergence; set rule=mask"
        )
    if rule.rule == "clamp" and rule.level == "sequence" and rule.aggregate == "max":
        yield (
            f"{key}.aggregate: expected mean or sum with rule=clamp and level=sequence, got max; the largest token "
            "does not bound the weight of a sequence, which is a mean or a product; set rule=mask"
        )
