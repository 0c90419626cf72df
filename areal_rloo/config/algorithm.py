"""The section `algorithm`: every option between a reward and the loss, and the checks that need more than one of them.

docs/algorithms.md has the equations, and how AReaL, verl, TRL and ms-swift call the same things.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from areal_rloo.config.presets import PresetName
from areal_rloo.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)
from areal_rloo.errors import ConfigError

NormLevel = Literal["group", "batch", "none"]


class NormConfig(Section, frozen=True):
    """How a scalar per trajectory (or token) is centred and scaled (see `areal_rloo.algorithm.advantage`)."""

    mean_level: NormLevel = "none"
    mean_leave1out: bool = False
    std_level: NormLevel = "none"
    std_unbiased: bool = True
    over: Literal["trajectories", "tokens"] = "trajectories"  # tokens: a value counts once for each token in the loss
    eps: NonNegativeFloat = 1e-6  # added to the standard deviation


class RewardsConfig(Section, frozen=True):
    """What becomes of a task's reward r before any norm: clip((r - penalties + bias) * scale)."""

    bias: float = 0.0
    scale: float = 1.0
    clip: tuple[float, float] | None = None  # lowest and highest
    truncated_penalty: NonNegativeFloat = 0.0  # where the engine stopped at max_new_tokens
    missing_eos_penalty: NonNegativeFloat = 0.0  # where the last token is no stop token, whatever the engine says
    overlong_tokens: NonNegativeInt = 0  # the last so many of max_new_tokens cost more and more; 0: none
    overlong_penalty: NonNegativeFloat = 1.0  # the cost at max_new_tokens
    mask_truncated: bool = False  # take truncated completions out of the loss; they stay in their group's mean


class BehaviourWeightConfig(Section, frozen=True):
    """What happens to a behaviour_weight w (proximal / behaviour) past a bound.

    `metric` is what the bounds are on: w itself, k1 = log w, k2 = (log w)^2 / 2 or k3 = w - 1 - log w.
    """

    rule: Literal["mask", "clamp", "none", "ignore"] = "clamp"  # out of the loss; to the bound; as it is; w = 1
    level: Literal["token", "sequence"] = "token"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    aggregate: Literal["mean", "sum", "max"] = "mean"  # over a sequence: of log w for `ratio`, else of the metric
    lower: float | None = None
    upper: float | None = 5.0


class LossConfig(Section, frozen=True):
    """What is summed over the tokens (see `areal_rloo.algorithm.loss`)."""

    kind: Literal["ppo", "cispo", "reinforce"] = "ppo"
    ratio_level: Literal["token", "sequence_mean", "sequence_sum"] = "token"  # GSPO's and TRL's are of the sequence
    decoupled: bool = True  # false: clip against the behaviour policy, as plain PPO does
    proximal: Literal["recompute", "reuse", "interpolate"] = "recompute"  # logprobs of all minibatches but the first
    eps_low: NonNegativeFloat = 0.2
    eps_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, msgspec.Meta(gt=1)] | None = None  # most a ratio counts with a negative advantage
    behaviour_weight: BehaviourWeightConfig = BehaviourWeightConfig()
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    entropy_coefficient: float = 0.0  # of the bonus for a policy that is less sure

    @property
    def of_tokens(self) -> bool:
        """Whether the loss of a token reads no other token's logprobs."""
        weight = self.behaviour_weight
        return self.ratio_level == "token" and (weight.level == "token" or weight.rule == "ignore")


class AdaptiveKLConfig(Section, frozen=True):
    """Steers `kl.coefficient` towards a divergence (see `areal_rloo.algorithm.kl`)."""

    target: PositiveFloat = 0.1  # nats a token, by the estimator
    horizon: PositiveInt = 10000  # trajectories


class KLConfig(Section, frozen=True):
    """The divergence from the reference policy (see `areal_rloo.algorithm.kl`)."""

    coefficient: NonNegativeFloat = 0.0  # 0: no KL term, and no reference model is loaded
    placement: Literal["reward", "loss"] = "reward"  # of the behaviour policy, or of the current one with a gradient
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    adaptive: AdaptiveKLConfig | None = None  # null: the coefficient stays


class AlgorithmConfig(Section, frozen=True):
    """What is not written comes from the preset."""

    preset: PresetName = "rloo"
    group_size: PositiveInt = 8
    max_staleness: NonNegativeInt = 2  # eta; 0 is synchronous
    stale_tokens: Literal["mask", "drop", "wait"] = "mask"
    drop_groups_of_one: bool = True
    min_reward_std: NonNegativeFloat = 0.0  # groups with a smaller one are dropped and replaced (dynamic sampling)
    group_filter: str | None = None  # module:function or file.py:function; called with a Group, true keeps it
    rewards: RewardsConfig = RewardsConfig()
    reward_norm: NormConfig = NormConfig()
    returns: Literal["trajectory", "token"] = "trajectory"  # token: each token has its own, of what comes after it
    discount: Probability = 1.0  # of what comes one token later; needs returns=token
    adv_norm: NormConfig = NormConfig(mean_level="group", mean_leave1out=True)
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()


def validate_algorithm(algorithm: AlgorithmConfig, *, max_new_tokens: int) -> None:
    """Check what no single field can check.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    for name, norm in (("adv_norm", algorithm.adv_norm), ("reward_norm", algorithm.reward_norm)):
        _validate_norm(f"algorithm.{name}", norm, algorithm.group_size)
    _validate_returns(algorithm)
    _validate_rewards(algorithm.rewards, max_new_tokens)
    _validate_loss(algorithm.loss)
    _validate_behaviour_weight(algorithm.loss.behaviour_weight)
    _validate_kl(algorithm.kl)
    if algorithm.min_reward_std > 0 and algorithm.group_size == 1:
        raise ConfigError(
            f"algorithm.min_reward_std: expected 0 with algorithm.group_size=1, got {algorithm.min_reward_std}; one "
            "reward has no deviation, so every group would be dropped"
        )


def _validate_norm(key: str, norm: NormConfig, group_size: int) -> None:
    if norm.mean_level == "group" and group_size == 1:
        raise ConfigError(
            f"algorithm.group_size: expected at least 2 with {key}.mean_level=group (RLOO, GRPO), got 1; a group of "
            "one has no others to compare with, and every advantage would be 0"
        )
    if not norm.mean_leave1out:
        return
    if norm.over == "tokens":
        raise ConfigError(
            f"{key}.over: expected trajectories with mean_leave1out, got tokens; leaving one token out, weighted by "
            f"length, is not RLOO; set {key}.over=trajectories"
        )
    if norm.mean_level == "none":
        raise ConfigError(
            f"{key}.mean_leave1out: true needs a mean to leave one out of, but mean_level is none; set "
            f"{key}.mean_level=group, or mean_leave1out=false"
        )


def _validate_returns(algorithm: AlgorithmConfig) -> None:
    norm = algorithm.adv_norm
    if algorithm.returns == "trajectory":
        if algorithm.discount != 1:
            raise ConfigError(
                f"algorithm.discount: expected 1 with algorithm.returns=trajectory, got {algorithm.discount}; set "
                "algorithm.returns=token, so that each token has a return to discount"
            )
        return
    if norm.mean_leave1out:
        raise ConfigError(
            "algorithm.returns: expected trajectory with algorithm.adv_norm.mean_leave1out, got token; leave one out "
            "before the returns: algorithm.reward_norm={mean_level: group, mean_leave1out: true} with "
            "algorithm.adv_norm={mean_level: none, mean_leave1out: false}"
        )
    if norm.over != "tokens" and (norm.mean_level != "none" or norm.std_level != "none"):
        raise ConfigError(
            f"algorithm.adv_norm.over: expected tokens with algorithm.returns=token, got {norm.over}; a return of each "
            "token is normed over tokens"
        )


def _validate_rewards(rewards: RewardsConfig, max_new_tokens: int) -> None:
    if rewards.clip is not None and not rewards.clip[0] < rewards.clip[1]:
        raise ConfigError(f"algorithm.rewards.clip: expected [lowest, highest] in this order, got {list(rewards.clip)}")
    if rewards.overlong_penalty != RewardsConfig().overlong_penalty and rewards.overlong_tokens == 0:
        raise ConfigError(
            f"algorithm.rewards.overlong_tokens: expected how many tokens are overlong with overlong_penalty="
            f"{rewards.overlong_penalty}, got 0, which is none"
        )
    if rewards.overlong_tokens > max_new_tokens:
        raise ConfigError(
            f"algorithm.rewards.overlong_tokens: expected at most rollout.sampling.max_new_tokens={max_new_tokens}, "
            f"got {rewards.overlong_tokens}"
        )


def _validate_loss(loss: LossConfig) -> None:
    """Refuse what would be read and do nothing."""
    key = "algorithm.loss"
    if loss.kind == "reinforce" and loss.ratio_level != "token":
        raise ConfigError(
            f"{key}.ratio_level: expected token with kind=reinforce, which has no ratio, got {loss.ratio_level}"
        )
    if loss.kind != "ppo" and loss.dual_clip is not None:
        raise ConfigError(
            f"{key}.dual_clip: expected null with kind={loss.kind}, got {loss.dual_clip}; only ppo has it"
        )
    if loss.decoupled:
        return
    if loss.kind == "reinforce":
        raise ConfigError(
            f"{key}.decoupled: expected true with kind=reinforce, got false; without a ratio to the behaviour policy "
            f"nothing would correct for older weights; set {key}.behaviour_weight.rule=ignore if that is what you want"
        )
    if loss.proximal != "recompute":
        raise ConfigError(f"{key}.proximal: {loss.proximal} is read only with decoupled=true; leave it out")
    if loss.behaviour_weight != BehaviourWeightConfig():
        raise ConfigError(
            f"{key}.behaviour_weight: set, and read only with decoupled=true, since w is 1 without it; leave it out"
        )


def _validate_kl(kl: KLConfig) -> None:
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator == "k1":
        raise ConfigError(
            "algorithm.kl.estimator: expected k2, k3 or abs with placement=loss, got k1, whose gradient is 0 in "
            "expectation; set k2 for the gradient of KL(current, reference), or k3 as GRPO has it"
        )
    if kl.adaptive is not None and kl.coefficient == 0:
        raise ConfigError(
            "algorithm.kl.coefficient: expected more than 0 with algorithm.kl.adaptive, got 0, which no factor moves; "
            "set the coefficient to start from"
        )


def _validate_behaviour_weight(rule: BehaviourWeightConfig) -> None:
    key = "algorithm.loss.behaviour_weight"
    if rule.aggregate != "mean" and rule.level == "token":
        raise ConfigError(
            f"{key}.aggregate: expected mean with level=token, got {rule.aggregate}; a token by itself has nothing to "
            f"aggregate; set {key}.level=sequence"
        )
    if rule.rule in ("none", "ignore"):
        return
    if rule.upper is None and rule.lower is None:
        raise ConfigError(f"{key}.upper: expected a bound with rule={rule.rule}, got none; set one, or {key}.rule=none")
    lower, upper = _bound(rule.lower, -math.inf), _bound(rule.upper, math.inf)
    if lower > upper:
        raise ConfigError(f"{key}.lower: expected at most upper={upper}, got {lower}")
    if rule.metric in ("ratio", "k2", "k3") and upper <= 0:
        raise ConfigError(f"{key}.upper: expected more than 0 with metric={rule.metric}, got {upper}")
    if rule.rule == "clamp" and rule.metric != "ratio":
        raise ConfigError(
            f"{key}.metric: expected ratio with rule=clamp, got {rule.metric}; a weight is set to a bound of its own, "
            "not of a divergence; set rule=mask"
        )
    if rule.rule == "clamp" and rule.level == "sequence" and rule.aggregate == "max":
        raise ConfigError(
            f"{key}.aggregate: expected mean or sum with rule=clamp and level=sequence, got max; the weight of a "
            "sequence is its mean or its product, so its largest token sets no bound on it; set rule=mask"
        )


def _bound(value: float | None, absent: float) -> float:
    return absent if value is None else value
