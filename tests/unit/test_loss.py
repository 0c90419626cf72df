"""The decoupled loss against hand-written values, and the token weights."""

import pytest
import torch

from areal_rloo.algorithm.loss import decoupled_ppo_loss, token_weights
from areal_rloo.config import BehaviourWeightConfig, LossConfig


def _loss(
    current: list[float],
    proximal: list[float],
    behaviour: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
    config: LossConfig | None = None,
) -> tuple[float, list[float], object]:
    leaf = torch.tensor(current, requires_grad=True)
    num = len(current)
    output = decoupled_ppo_loss(
        behaviour_logprobs=torch.tensor(behaviour),
        proximal_logprobs=torch.tensor(proximal),
        current_logprobs=leaf,
        advantages=torch.tensor(advantages),
        token_weights=torch.tensor(weights or [1 / num] * num),
        config=config or LossConfig(),
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
    decoupled_ppo_loss(
        behaviour_logprobs=torch.tensor([-0.7, -0.8]),
        proximal_logprobs=proximal,
        current_logprobs=current,
        advantages=torch.tensor([1.0, -2.0]),
        token_weights=torch.tensor([0.5, 0.5]),
        config=LossConfig(),
    ).loss.backward()
    assert current.grad is not None
    assert proximal.grad is None


def test_a_ratio_past_the_clip_gives_no_gradient_where_it_would_push_further() -> None:
    _, gradient, _ = _loss([-0.5, -0.5], [-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0])
    ratio = torch.exp(torch.tensor(0.5)).item()
    assert gradient == pytest.approx([0.0, ratio / 2])


def test_the_behaviour_weight_scales_the_loss_without_a_gradient_of_its_own() -> None:
    loss, gradient, _ = _loss([-1.0], [-1.0], [-1.5], [1.0])
    weight = torch.exp(torch.tensor(0.5)).item()
    assert loss == pytest.approx(-weight)
    assert gradient == pytest.approx([-weight])


def test_clamp_limits_and_mask_removes_a_large_behaviour_weight() -> None:
    for rule, expected in (("clamp", -5.0), ("mask", 0.0), ("none", -torch.exp(torch.tensor(3.0)).item())):
        config = LossConfig(behaviour_weight=BehaviourWeightConfig(rule=rule, upper=5.0))
        loss, _, _ = _loss([-1.0], [-1.0], [-4.0], [1.0], config=config)
        assert loss == pytest.approx(expected)


def test_without_decoupling_the_clip_is_anchored_at_the_behaviour_policy() -> None:
    loss, _, _ = _loss([-1.0], [-1.0], [-1.1], [1.0], config=LossConfig(decoupled=False))
    assert loss == pytest.approx(-torch.exp(torch.tensor(0.1)).item())


def test_a_masked_token_gives_nothing_whatever_its_logprobs() -> None:
    broken = float("nan")
    loss, gradient, output = _loss([-1.0, broken], [-1.0, -1e4], [-1.0, broken], [1.0, 1.0], [1.0, 0.0])
    assert loss == pytest.approx(-1.0)
    assert gradient == [-1.0, 0.0]
    assert float(output.num_tokens) == 1


def test_token_weights_of_every_aggregation_by_hand() -> None:
    mask = torch.tensor([True, True, True, False, True, False])
    sequence = torch.tensor([0, 0, 0, 1, 1, 2])
    expected = {
        "token_mean": [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0],
        "seq_mean_token_mean": [1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0],
        "seq_mean_token_sum": [1 / 2, 1 / 2, 1 / 2, 0, 1 / 2, 0],
        "seq_mean_token_sum_norm": [1 / 20, 1 / 20, 1 / 20, 0, 1 / 20, 0],
    }
    for aggregation, weights in expected.items():
        got = token_weights(
            mask, sequence, num_sequences=3, max_new_tokens=10, config=LossConfig(aggregation=aggregation)
        )
        assert got.tolist() == pytest.approx(weights)


def test_no_token_in_the_loss_gives_weights_of_zero() -> None:
    mask = torch.zeros(3, dtype=torch.bool)
    index = torch.tensor([0, 0, 1])
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        weights = token_weights(
            mask, index, num_sequences=2, max_new_tokens=4, config=LossConfig(aggregation=aggregation)
        )
        assert weights.tolist() == [0, 0, 0]
