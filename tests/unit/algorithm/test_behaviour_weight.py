"""Test behaviour_weight and its rules against a slow reference, token by token and sequence by sequence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.algorithm.behaviour_weight import behaviour_weights, interpolated_proximal
from areal_rloo.config import BehaviourWeightConfig

METRICS = {
    "ratio": math.exp,
    "k1": lambda log_w: log_w,
    "k2": lambda log_w: log_w**2 / 2,
    "k3": lambda log_w: math.exp(log_w) - 1 - log_w,
}
AGGREGATES = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max}


def _slow(log_weights: list[float], kept: list[bool], sequence: list[int], rule: BehaviourWeightConfig) -> list[float]:
    """Return the weight of every kept token, 0 for the others."""
    weights = []
    for index, log_w in enumerate(log_weights):
        if not kept[index]:
            weights.append(0.0)
            continue
        same = [i for i in range(len(log_weights)) if kept[i] and sequence[i] == sequence[index]]
        weight, judged = math.exp(log_w), METRICS[rule.metric](log_w)
        if rule.level == "sequence":
            logs = [log_weights[i] for i in same]
            if rule.metric == "ratio":
                weight = math.exp(sum(logs) if rule.aggregate == "sum" else sum(logs) / len(logs))
                judged = math.exp(AGGREGATES[rule.aggregate](logs))
            else:
                judged = AGGREGATES[rule.aggregate]([METRICS[rule.metric](one) for one in logs])
        lower = -math.inf if rule.lower is None else rule.lower
        upper = math.inf if rule.upper is None else rule.upper
        if not lower <= judged <= upper:
            if rule.rule == "mask":
                weight = 0.0
            if rule.rule == "clamp":
                weight = min(max(weight, lower, 0.0), upper)
        weights.append(weight)
    return weights


tokens = st.lists(st.tuples(st.floats(-3, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=10)
bounds = {
    "lower": st.sampled_from([None, 0.3, 0.8]),
    "upper": st.sampled_from([0.9, 1.7, 5.0]),
    "level": st.sampled_from(["token", "sequence"]),
    "aggregate": st.sampled_from(["mean", "sum", "max"]),
}
rules = st.builds(
    BehaviourWeightConfig, rule=st.sampled_from(["mask", "none"]), metric=st.sampled_from(list(METRICS)), **bounds
) | st.builds(BehaviourWeightConfig, **bounds)


@given(tokens, rules)
def test_every_rule_equals_the_slow_reference(
    batch: list[tuple[float, bool, int]], rule: BehaviourWeightConfig
) -> None:
    logs, kept, sequence = (list(column) for column in zip(*batch, strict=True))
    in_loss = torch.tensor(kept)
    log_weight = torch.where(in_loss, torch.tensor(logs, dtype=torch.float64), 0.0)
    got = behaviour_weights(log_weight, in_loss, torch.tensor(sequence), rule)
    expected = torch.tensor(_slow(logs, kept, sequence, rule), dtype=torch.float64)
    torch.testing.assert_close(torch.where(in_loss, got.weight, 0.0), expected)
    assert torch.equal(got.masked, in_loss & (got.weight == 0))
    assert torch.equal(got.clamped, in_loss & (got.weight != torch.exp(got.log)) & ~got.masked)


def test_a_sequence_out_of_bounds_masks_exactly_its_own_tokens() -> None:
    rule = BehaviourWeightConfig(rule="mask", level="sequence", metric="k3", aggregate="max", upper=0.5)
    log_weight = torch.tensor([0.0, 2.0, 0.1, 0.1])
    got = behaviour_weights(log_weight, torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]), rule)
    assert got.masked.tolist() == [True, True, False, False]
    assert got.weight[2:].tolist() == pytest.approx([math.exp(0.1)] * 2)


def test_each_metric_equals_hand_computed_values() -> None:
    """For w = e and w = 1/e: k1 = 1 and -1, k2 = 1/2 twice, k3 = e - 2 and 1/e."""
    log_weight, everything, sequence = torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    for metric, upper, masked in (
        ("ratio", 2.7, [True, False]),
        ("ratio", 2.72, [False, False]),
        ("k1", 0.9, [True, False]),
        ("k2", 0.49, [True, True]),
        ("k2", 0.51, [False, False]),
        ("k3", 0.5, [True, False]),
        ("k3", 0.36, [True, True]),
    ):
        rule = BehaviourWeightConfig(rule="mask", metric=metric, upper=upper)  # type: ignore[arg-type]
        assert behaviour_weights(log_weight, everything, sequence, rule).masked.tolist() == masked, (metric, upper)


def test_sequence_weight_is_the_product_or_geometric_mean() -> None:
    log_weight, everything, one = torch.tensor([0.2, 0.4]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 0])
    for aggregate, expected in (("sum", math.exp(0.6)), ("mean", math.exp(0.3)), ("max", math.exp(0.3))):
        rule = BehaviourWeightConfig(rule="none", level="sequence", aggregate=aggregate)
        assert behaviour_weights(log_weight, everything, one, rule).weight.tolist() == pytest.approx([expected] * 2)


def test_interpolated_proximal_is_exact_for_fresh_tokens() -> None:
    behaviour, current = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0], requires_grad=True)
    got = interpolated_proximal(behaviour, current, torch.tensor([0, 1, 3]), progress=1.0)
    assert got.tolist() == pytest.approx([-1.0, -1.5, -1.75])
    assert not got.requires_grad


@pytest.mark.parametrize("progress", [1 / 8, 1 / 2, 7 / 8, 1.0])
def test_interpolated_proximal_is_exact_for_linear_motion(progress: float) -> None:
    """Logprobs that move by the same amount in each version, and in each minibatch by a share of this amount."""
    staleness, motion = torch.tensor([0, 1, 2, 5]), torch.tensor([0.3, -0.2, 0.7, 0.1])
    behaviour = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    proximal = behaviour + staleness * motion
    got = interpolated_proximal(behaviour, proximal + progress * motion, staleness, progress=progress)
    torch.testing.assert_close(got, proximal)
