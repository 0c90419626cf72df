"""Test loss and gradients of random settings against the equations, token by token in float64, without vectors."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.token_weights import token_weights
from torch import Tensor

from areal_rloo.algorithm.kl import KLTerm
from areal_rloo.algorithm.loss import policy_loss
from areal_rloo.config import BehaviourWeightConfig, KLConfig, LossConfig
from areal_rloo.config.algorithm import AlgorithmConfig, algorithm_mistakes

NUM_SETTINGS = 445
MOST_NEW_TOKENS = 7
AGGREGATES: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "mean": lambda values: sum(values, torch.zeros(())) / len(values),
    "sum": lambda values: sum(values, torch.zeros(())),
    "max": lambda values: torch.stack(list(values)).max(),
}


@dataclass
class Setting:
    """Options, and tokens in lists: of each token the sequence, the sample, and whether it is in the loss."""

    loss: LossConfig
    kl: KLConfig | None
    sequence: list[int]
    sample: list[int]
    kept: list[bool]
    behaviour: list[float]
    proximal: list[float]
    reference: list[float]
    advantages: list[float]
    current: list[Tensor]  # with a gradient, like the entropies
    entropy: list[Tensor]

    @classmethod
    def drawn(cls, seed: int) -> "Setting":
        rng = random.Random(seed)
        loss, kl = _options(rng)
        lengths = [rng.randint(1, 5) for _ in range(rng.randint(1, 6))]
        num_samples = rng.randint(1, len(lengths))
        sample_of = [index if index < num_samples else rng.randrange(num_samples) for index in range(len(lengths))]
        absent = [rng.random() < 0.2 for _ in lengths]
        sequence = [index for index, length in enumerate(lengths) for _ in range(length)]
        size = rng.choice([0.02, 0.3, 1.0, 12.0])  # the largest reaches the limit of log ratios
        behaviour = [-abs(rng.gauss(0, 2)) for _ in sequence]
        proximal = [value + rng.gauss(0, size) for value in behaviour]
        current = [value + rng.gauss(0, size) for value in proximal]
        return cls(
            loss=loss,
            kl=kl,
            sequence=sequence,
            sample=[sample_of[index] for index in sequence],
            kept=[not absent[index] and rng.random() < 0.75 for index in sequence],
            behaviour=behaviour,
            proximal=proximal,
            reference=[value + rng.gauss(0, size) for value in current],
            advantages=[rng.gauss(0, 1) for _ in sequence],
            current=[_leaf(value) for value in current],
            entropy=[_leaf(abs(rng.gauss(0, 1))) for _ in sequence],
        )


def _leaf(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def _options(rng: random.Random) -> tuple[LossConfig, KLConfig | None]:
    """Draw options until the config accepts them."""
    draw: Any = rng.choice
    while True:
        rule = BehaviourWeightConfig(
            rule=draw(["mask", "clamp", "clamp", "clamp", "none", "ignore"]),
            level=draw(["token", "sequence"]),
            metric=draw(["ratio", "ratio", "ratio", "k1", "k2", "k3"]),
            aggregate=draw(["mean", "sum", "max"]),
            lower=draw([None, 0.01, 0.7]),
            upper=draw([None, 0.3, 1.2, 5.0]),
        )
        decoupled = draw([True] * 8 + [False])
        loss = LossConfig(
            kind=draw(["ppo", "cispo", "reinforce"]),
            ratio_level=draw(["token", "sequence_mean", "sequence_sum"]),
            decoupled=decoupled,
            eps_low=draw([0.2, 3e-4]),
            eps_high=draw([0.3, 4.0]),
            dual_clip=draw([None, 1.5]),
            behaviour_weight=rule if decoupled else BehaviourWeightConfig(),
            aggregation=draw(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]),
            count_masked=draw([False, True]),
            entropy_coefficient=draw([0.0, 0.01, -0.02]),
        )
        kl = KLConfig(
            coefficient=draw([0.01, 0.5]),
            placement="loss",
            estimator=draw(["k1", "k2", "k3", "abs"]),
            correction=draw(["weight", "gradient", "none"]),
        )
        if not list(algorithm_mistakes(AlgorithmConfig(loss=loss, kl=kl), max_new_tokens=MOST_NEW_TOKENS)):
            return loss, draw([kl, kl, None])


def _limited(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-20, 20))


def _share(setting: Setting, token: int) -> float:
    """The share of a token in the mean of the minibatch."""
    of = [sum(kept for kept, one in zip(setting.kept, setting.sample, strict=True) if one == s) for s in setting.sample]
    counted = {s for s, num in zip(setting.sample, of, strict=True) if num > 0 or setting.loss.count_masked}
    match setting.loss.aggregation:
        case "token_mean":
            return 1 / sum(setting.kept)
        case "seq_mean_token_mean":
            return 1 / (len(counted) * of[token])
        case "seq_mean_token_sum":
            return 1 / len(counted)
        case "seq_mean_token_sum_norm":
            return 1 / (len(counted) * MOST_NEW_TOKENS)


def _weight(rule: BehaviourWeightConfig, logs: Sequence[Tensor], own: Tensor) -> Tensor:
    """w of a token, from log w of the tokens of the sequence and its own."""
    if rule.rule == "ignore":
        return torch.ones(())
    product = AGGREGATES["sum" if rule.aggregate == "sum" else "mean"](logs)
    log_weight = product if (rule.level, rule.metric) == ("sequence", "ratio") else own
    measure: Callable[[Tensor], Tensor] = {
        "ratio": lambda log: log,
        "k1": lambda log: log,
        "k2": lambda log: log**2 / 2,
        "k3": lambda log: torch.exp(log.clamp(max=20)) - 1 - log,
    }[rule.metric]
    judged = measure(own) if rule.level == "token" else AGGREGATES[rule.aggregate]([measure(log) for log in logs])
    judged, weight = (_limited(judged) if rule.metric == "ratio" else judged), _limited(log_weight)
    above = rule.upper is not None and judged > rule.upper
    below = rule.lower is not None and judged < rule.lower
    if rule.rule == "none" or not (above or below):
        return weight
    return torch.zeros(()) if rule.rule == "mask" else weight.clamp(rule.lower, rule.upper)


def _token_loss(setting: Setting, token: int) -> Tensor:
    """The loss of a token in the loss, before its share; stops gradients where the equations do."""
    loss, anchors = setting.loss, setting.proximal if setting.loss.decoupled else setting.behaviour
    same = [t for t, s in enumerate(setting.sequence) if s == setting.sequence[token] and setting.kept[t]]
    current, advantage = setting.current[token], setting.advantages[token]
    own = current - anchors[token]
    logs = [torch.tensor(anchors[t] - setting.behaviour[t], dtype=torch.float64) for t in same]
    weight = _weight(loss.behaviour_weight, logs, logs[same.index(token)])
    log_ratio = own
    if loss.ratio_level != "token":
        summed = sum(setting.current[t].detach() - anchors[t] for t in same)
        is_sum = loss.ratio_level == "sequence_sum"
        log_ratio = (summed if is_sum else summed / len(same)) + (len(same) if is_sum else 1) * (own - own.detach())
    ratio = _limited(log_ratio)
    clipped = ratio.clamp(1 - loss.eps_low, 1 + loss.eps_high)
    match loss.kind:
        case "ppo":
            objective = torch.minimum(ratio * advantage, clipped * advantage)
            if loss.dual_clip is not None and advantage < 0:
                objective = objective.clamp(min=loss.dual_clip * advantage)
        case "cispo":
            objective = clipped.detach() * advantage * current
        case "reinforce":
            objective = advantage * current
    objective = weight * objective + loss.entropy_coefficient * setting.entropy[token]
    if setting.kl is not None:
        d = current - setting.reference[token]
        divergence = {"k1": d, "k2": d**2 / 2, "k3": torch.exp((-d).clamp(max=20)) - 1 + d, "abs": d.abs()}
        factor = {"none": torch.ones(()), "gradient": weight * _limited(own), "weight": weight * _limited(own.detach())}
        objective = (
            objective - setting.kl.coefficient * factor[setting.kl.correction] * divergence[setting.kl.estimator]
        )
    return -objective


def _fast(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the package, with the leaves of current logprobs and entropies."""
    current, entropy = (
        torch.stack(values).detach().clone().requires_grad_() for values in (setting.current, setting.entropy)
    )
    sequence, config = torch.tensor(setting.sequence), setting.loss
    kept, sample = torch.tensor(setting.kept), torch.tensor(setting.sample)
    weights = token_weights(kept, sample, max_new_tokens=MOST_NEW_TOKENS, config=config)
    double: Callable[[Sequence[float]], Tensor] = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    kl = setting.kl
    loss = policy_loss(
        behaviour_logprobs=double(setting.behaviour),
        proximal_logprobs=double(setting.proximal),
        current_logprobs=current,
        entropy=entropy,
        advantages=double(setting.advantages),
        token_weights=weights,
        staleness=torch.zeros_like(sequence),
        sequence_index=sequence,
        config=config,
        kl=None if kl is None else KLTerm(double(setting.reference), kl.coefficient, kl),
    ).loss
    return loss, current, entropy


@pytest.mark.parametrize("part", range(5))
def test_random_settings_equal_the_equations_token_by_token(part: int) -> None:
    for seed in range(part, NUM_SETTINGS, 5):
        setting = Setting.drawn(seed)
        expected = sum(
            (_share(setting, token) * _token_loss(setting, token) for token, kept in enumerate(setting.kept) if kept),
            torch.zeros((), dtype=torch.float64),
        )
        loss, *leaves = _fast(setting)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9), seed
        if not any(setting.kept):
            continue
        slow = torch.autograd.grad(expected, setting.current + setting.entropy, materialize_grads=True)
        fast = torch.cat(torch.autograd.grad(loss, leaves, materialize_grads=True))
        torch.testing.assert_close(
            fast, torch.stack(slow), rtol=1e-6, atol=1e-9, msg=lambda text, s=seed: f"{s}: {text}"
        )
        assert all(math.isfinite(value) for value in fast.tolist())
