"""Test the policy loss against hand-computed values and for any finite input, and the token weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.token_weights import token_weights

from areal_rloo.algorithm.diagnostics import diagnose, measure
from areal_rloo.algorithm.kl import KLTerm
from areal_rloo.algorithm.loss import LossOutput, policy_loss
from areal_rloo.config import BehaviourWeightConfig, KLConfig, LossConfig


def _loss(
    current: list[float],
    proximal: list[float],
    behaviour: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
    config: LossConfig | None = None,
    sequence: list[int] | None = None,
    kl: KLTerm | None = None,
) -> tuple[float, list[float], LossOutput]:
    leaf = torch.tensor(current, requires_grad=True)
    num = len(current)
    output = policy_loss(
        behaviour_logprobs=torch.tensor(behaviour),
        proximal_logprobs=torch.tensor(proximal),
        current_logprobs=leaf,
        entropy=torch.zeros(num),
        advantages=torch.tensor(advantages),
        token_weights=torch.tensor(weights or [1 / num] * num),
        staleness=torch.zeros(num, dtype=torch.int64),
        sequence_index=torch.tensor(sequence or [0] * num),
        config=config or LossConfig(),
        kl=kl,
    )
    output.loss.backward()
    assert leaf.grad is not None
    return float(output.loss.detach()), leaf.grad.tolist(), output


def test_on_policy_gradient_is_reinforce() -> None:
    logprobs = [-0.5, -1.0, -2.0]
    _, gradient, _ = _loss(logprobs, logprobs, logprobs, [1.0, -2.0, 0.5])
    assert gradient == pytest.approx([-1 / 3, 2 / 3, -0.5 / 3])


def test_proximal_and_behaviour_logprobs_never_get_a_gradient() -> None:
    current, proximal = torch.tensor([-0.5, -1.0], requires_grad=True), torch.tensor([-0.6, -0.9], requires_grad=True)
    policy_loss(
        behaviour_logprobs=torch.tensor([-0.7, -0.8]),
        proximal_logprobs=proximal,
        current_logprobs=current,
        entropy=torch.zeros(2),
        advantages=torch.tensor([1.0, -2.0]),
        token_weights=torch.tensor([0.5, 0.5]),
        staleness=torch.zeros(2, dtype=torch.int64),
        sequence_index=torch.tensor([0, 0]),
        config=LossConfig(),
    ).loss.backward()
    assert current.grad is not None
    assert proximal.grad is None


def test_a_clipped_ratio_gives_no_gradient() -> None:
    _, gradient, _ = _loss([-0.5, -0.5], [-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0])
    ratio = torch.exp(torch.tensor(0.5)).item()
    assert gradient == pytest.approx([0.0, ratio / 2])


def test_behaviour_weight_scales_the_loss_without_a_gradient() -> None:
    loss, gradient, _ = _loss([-1.0], [-1.0], [-1.5], [1.0])
    weight = torch.exp(torch.tensor(0.5)).item()
    assert loss == pytest.approx(-weight)
    assert gradient == pytest.approx([-weight])


def test_clamp_limits_and_mask_removes_a_large_behaviour_weight() -> None:
    for rule, expected in (("clamp", -5.0), ("mask", 0.0), ("none", -torch.exp(torch.tensor(3.0)).item())):
        config = LossConfig(behaviour_weight=BehaviourWeightConfig(rule=rule, upper=5.0))
        loss, _, _ = _loss([-1.0], [-1.0], [-4.0], [1.0], config=config)
        assert loss == pytest.approx(expected)


def test_coupled_loss_clips_against_the_behaviour_policy() -> None:
    loss, _, _ = _loss([-1.0], [-1.0], [-1.1], [1.0], config=LossConfig(decoupled=False))
    assert loss == pytest.approx(-torch.exp(torch.tensor(0.1)).item())


def test_a_masked_token_has_no_loss_for_any_logprobs() -> None:
    broken = float("nan")
    loss, gradient, output = _loss([-1.0, broken], [-1.0, -1e4], [-1.0, broken], [1.0, 1.0], [1.0, 0.0])
    assert loss == pytest.approx(-1.0)
    assert gradient == [-1.0, 0.0]
    assert len(output.tokens.ratio) == 1


KINDS = ("ppo", "cispo", "reinforce")
LEVELS = ("token", "sequence_mean", "sequence_sum")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_with_equal_policies_the_gradient_is_reinforce(kind: str, level: str, dual_clip: float | None) -> None:
    """Differentiate advantage times the summed log current of a sequence, in the mean of the level."""
    config = LossConfig(kind=kind, ratio_level=level, dual_clip=dual_clip)  # type: ignore[arg-type]
    logprobs, sequence, advantages = [-0.5, -1.0, -2.0, -0.1, -3.0], [0, 0, 0, 1, 1], [2.0, 2.0, 2.0, -1.0, -1.0]
    lengths = [3, 3, 3, 2, 2]
    weights = [1 / (2 * n) for n in lengths]  # seq_mean_token_mean
    _, gradient, _ = _loss(logprobs, logprobs, logprobs, advantages, weights, config, sequence)
    by_sequence = level == "sequence_sum" and kind == "ppo"  # with the product, every token gets the full gradient
    scale = lengths if by_sequence else [1] * 5
    expected = [-a * w * s for a, w, s in zip(advantages, weights, scale, strict=True)]
    assert gradient == pytest.approx(expected)


def test_dual_clip_limits_the_loss_of_negative_advantages() -> None:
    current, before = [-1.0, -1.0, -1.0], [-4.0, -1.1, -4.0]
    plain, _, _ = _loss(current, before, before, [-1.0, -1.0, 1.0])
    dual, gradient, _ = _loss(current, before, before, [-1.0, -1.0, 1.0], config=LossConfig(dual_clip=3.0))
    ratios = [math.exp(3.0), math.exp(0.1)]
    assert plain == pytest.approx((ratios[0] + ratios[1] - 1.2) / 3)
    assert dual == pytest.approx((3.0 + ratios[1] - 1.2) / 3)
    assert gradient == pytest.approx([0.0, ratios[1] / 3, 0.0])


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    _, gradient, output = _loss([-0.5], [-1.0], [-1.0], [1.0], config=LossConfig(kind="cispo"))
    assert gradient == pytest.approx([-1.2])
    assert output.tokens.ratio_clipped.tolist() == [True]


def test_a_token_counts_as_clipped_if_the_clip_decides_its_loss() -> None:
    current, before = [-0.5, -0.5, -2.0, -2.0], [-1.0, -1.0, -1.0, -1.0]
    advantages = [1.0, -1.0, 1.0, -1.0]
    for config, expected in (
        (LossConfig(), [True, False, False, True]),
        (LossConfig(dual_clip=1.5), [True, True, False, True]),  # negative advantage, ratio e^0.5
        (LossConfig(kind="cispo"), [True, True, True, True]),
        (LossConfig(kind="reinforce"), [False] * 4),
    ):
        _, _, output = _loss(current, before, before, advantages, config=config)
        assert output.tokens.ratio_clipped.tolist() == expected


def test_entropy_bonus_is_mean_entropy_times_the_coefficient() -> None:
    entropy = torch.tensor([0.5, 1.5, 9.0], requires_grad=True)
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    output = policy_loss(
        behaviour_logprobs=logprobs,
        proximal_logprobs=logprobs,
        current_logprobs=logprobs,
        entropy=entropy,
        advantages=torch.zeros(3),
        token_weights=torch.tensor([0.5, 0.5, 0.0]),
        staleness=torch.zeros(3, dtype=torch.int64),
        sequence_index=torch.zeros(3, dtype=torch.int64),
        config=LossConfig(entropy_coefficient=0.1),
    )
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-0.1)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05, 0.0])


def test_sequence_ratio_is_the_product_or_geometric_mean() -> None:
    current, before = [-1.0, -1.0, -2.0], [-1.2, -1.3, -2.0]
    for level, expected in (("sequence_sum", math.exp(0.5)), ("sequence_mean", math.exp(0.25))):
        config = LossConfig(ratio_level=level, eps_high=10.0)  # type: ignore[arg-type]
        loss, _, output = _loss(current, before, before, [1.0, 1.0, 0.0], [0.5, 0.5, 1.0], config, [0, 0, 1])
        assert loss == pytest.approx(-expected)
        assert float(output.tokens.ratio.max()) == pytest.approx(expected)


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_sum"])
def test_with_sequence_ratios_token_advantages_stay_separate(level: str) -> None:
    """A masked token has no gradient in any sequence; different advantages do not cancel."""
    scale = 2 if level == "sequence_sum" else 1
    masked = LossConfig(ratio_level=level, behaviour_weight=BehaviourWeightConfig(rule="mask"))  # type: ignore[arg-type]
    logprobs = [-1.0, -1.0]
    _, gradient, _ = _loss(logprobs, logprobs, [-1.0, -9.0], [1.0, 1.0], config=masked)
    assert gradient == pytest.approx([-0.5 * scale, 0.0])
    _, gradient, _ = _loss(logprobs, logprobs, [-1.0, -2.0], [1.0, -1.0], config=masked)
    assert gradient == pytest.approx([-0.5 * scale, 0.5 * math.e * scale])


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_sum"])
def test_sequence_ratio_gradient_equals_direct_differentiation(level: str) -> None:
    """Differentiate the ratio itself, with the same advantage and weight for all tokens of a sequence."""
    before, current = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.9, -0.4], requires_grad=True)
    total = (current - before).sum()
    ratio = torch.exp(total if level == "sequence_sum" else total / 3)
    (-(ratio * 2.0)).backward()
    _, gradient, _ = _loss(
        current.tolist(),
        before.tolist(),
        before.tolist(),
        [2.0] * 3,
        config=LossConfig(ratio_level=level, eps_high=9.0),  # type: ignore[arg-type]
    )
    assert current.grad is not None
    assert gradient == pytest.approx(current.grad.tolist())


def test_an_ignored_behaviour_weight_is_one() -> None:
    config = LossConfig(kind="reinforce", behaviour_weight=BehaviourWeightConfig(rule="ignore"))
    _, gradient, output = _loss([-1.0], [-1.0], [-4.0], [1.0], config=config)
    assert gradient == [-1.0]
    assert math.isnan(output.tokens.behaviour_weight[0])


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(decoupled=False),
        LossConfig(kind="reinforce", behaviour_weight=BehaviourWeightConfig(rule="ignore")),
    ],
)
def test_without_a_weight_the_mean_is_absent_and_the_shares_are_0(config: LossConfig) -> None:
    """The alert of the shares adds both up, so none may be NaN."""
    numbers = diagnose(
        [[measure(_loss([-1.0, -2.0], [-1.1, -2.0], [-4.0, -2.0], [1.0, 1.0], config=config)[2].tokens)]]
    )
    assert math.isnan(numbers["behaviour_weight_mean"])
    assert math.isnan(numbers["behaviour_weight_max"])
    assert numbers["behaviour_weight_clamped_share"] == numbers["behaviour_weight_masked_share"] == 0
    assert math.isnan(numbers["ratio_mean"]) == (config.kind == "reinforce")
    assert numbers["ratio_clipped_share"] == (0 if config.kind == "reinforce" else 0.5)


def test_masked_tokens_do_not_change_the_sequence_ratio() -> None:
    config = LossConfig(ratio_level="sequence_mean", eps_high=10.0)
    loss, _, _ = _loss([-1.0, -9.0], [-1.5, -1.0], [-1.5, -1.0], [1.0, 1.0], [1.0, 0.0], config)
    assert loss == pytest.approx(-math.exp(0.5))


finite = st.floats(-1e4, 0.0)
rules = st.builds(
    BehaviourWeightConfig,
    rule=st.sampled_from(["mask", "none"]),
    level=st.sampled_from(["token", "sequence"]),
    metric=st.sampled_from(["ratio", "k1", "k2", "k3"]),
    aggregate=st.sampled_from(["mean", "sum", "max"]),
    lower=st.sampled_from([None, 0.5]),
) | st.builds(
    BehaviourWeightConfig,
    level=st.sampled_from(["token", "sequence"]),
    aggregate=st.sampled_from(["mean", "sum", "max"]),
    lower=st.sampled_from([None, 0.5]),
)


@given(
    st.lists(st.tuples(finite, finite, finite, st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=8),
    st.sampled_from(KINDS),
    st.sampled_from(LEVELS),
    rules,
    st.booleans(),
    st.sampled_from([None, 3.0]),
)
def test_any_finite_input_gives_a_finite_loss_and_gradient(
    tokens: list[tuple[float, float, float, float, bool]],
    kind: str,
    level: str,
    rule: BehaviourWeightConfig,
    decoupled: bool,
    dual_clip: float | None,
) -> None:
    config = LossConfig(
        kind=kind,  # type: ignore[arg-type]
        ratio_level=level,  # type: ignore[arg-type]
        decoupled=decoupled,
        dual_clip=dual_clip,
        behaviour_weight=rule,
    )
    behaviour, proximal, current, advantages, kept = (list(column) for column in zip(*tokens, strict=True))
    weights = [1 / len(tokens) if keep else 0.0 for keep in kept]
    sequence = [index // 2 for index in range(len(tokens))]
    loss, gradient, output = _loss(current, proximal, behaviour, advantages, weights, config, sequence)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))
    numbers = diagnose([[measure(output.tokens)]])
    numbers |= numbers.pop("behaviour_kl_by_staleness")
    absent = () if kind != "reinforce" else ("ratio_mean", "ratio_max")
    absent += () if decoupled else ("behaviour_weight_mean", "behaviour_weight_max")
    if any(kept):
        assert {name for name, value in numbers.items() if not math.isfinite(value)} == set(absent)


def test_a_ratio_beyond_the_limit_is_counted_without_gradient() -> None:
    loss, gradient, output = _loss([-0.5, -0.5], [-80.5, -0.5], [-80.5, -0.5], [-1.0, -1.0])
    assert loss == pytest.approx((math.exp(20.0) + 1) / 2)
    assert gradient == pytest.approx([0.0, 0.5])
    assert output.tokens.ratio_limited.tolist() == [True, False]
    _, _, output = _loss([-0.5], [-0.5], [-80.5], [1.0])
    assert output.tokens.ratio_limited.tolist() == [True], "a behaviour_weight beyond all measure is counted as well"
    product = LossConfig(behaviour_weight=BehaviourWeightConfig(level="sequence", aggregate="sum", rule="none"))
    _, _, output = _loss([-0.5] * 2, [-0.5] * 2, [-15.5] * 2, [1.0] * 2, config=product)
    assert output.tokens.ratio_limited.tolist() == [True, True], "so is the product of a sequence"


def test_only_ratios_that_the_loss_has_count_as_limited() -> None:
    mean = LossConfig(ratio_level="sequence_mean")
    far = ([-0.5, -0.5], [-30.5, -0.5], [-30.5, -0.5], [1.0] * 2)  # the log ratio of the sequence is 15
    assert not _loss(*far, config=mean)[2].tokens.ratio_limited.any()
    term = KLTerm(torch.tensor([-1.0, -1.0]), 0.1, KLConfig(coefficient=0.1, placement="loss", estimator="k2"))
    assert _loss(*far, config=mean, kl=term)[2].tokens.ratio_limited.tolist() == [True, False]
    assert not _loss(*far, config=LossConfig(kind="reinforce"))[2].tokens.ratio_limited.any()


def test_token_weights_equal_hand_computed_values() -> None:
    mask = torch.tensor([True, True, True, False, True, False])
    sequence = torch.tensor([0, 0, 0, 1, 1, 2])
    expected = {
        "token_mean": [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0],
        "seq_mean_token_mean": [1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0],
        "seq_mean_token_sum": [1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0],
        "seq_mean_token_sum_norm": [1 / 20, 1 / 20, 1 / 20, 0, 1 / 20, 0],
    }
    for aggregation, weights in expected.items():
        got = token_weights(mask, sequence, max_new_tokens=10, config=LossConfig(aggregation=aggregation))
        assert got.tolist() == pytest.approx(weights)
        config = LossConfig(aggregation=aggregation, count_masked=True)  # a third sample, without a token in the loss
        of_all = token_weights(mask, sequence, max_new_tokens=10, config=config)
        share = 1 if aggregation == "token_mean" else 2 / 3
        assert of_all.tolist() == pytest.approx([share * weight for weight in weights])


def test_without_a_token_in_the_loss_all_weights_are_zero() -> None:
    mask = torch.zeros(3, dtype=torch.bool)
    index = torch.tensor([0, 0, 1])
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        weights = token_weights(mask, index, max_new_tokens=4, config=LossConfig(aggregation=aggregation))
        assert weights.tolist() == [0, 0, 0]
