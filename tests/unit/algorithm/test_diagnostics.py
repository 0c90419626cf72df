"""Test the diagnostics of a step against hand-computed values."""

import math

import pytest
import torch

from areal_rloo.algorithm.diagnostics import diagnose
from areal_rloo.algorithm.kl import adapted_coefficient, kl_estimate
from areal_rloo.algorithm.loss import TokenOutcomes
from areal_rloo.config import AdaptiveKLConfig


def _outcomes(num: int, **changes: list[float]) -> TokenOutcomes:
    floats = {name: [0.0] * num for name in TokenOutcomes._fields} | {"behaviour_weight": [1.0] * num}
    values = floats | changes
    kinds = {"staleness": torch.int64}
    return TokenOutcomes(
        **{
            name: torch.tensor(
                value,
                dtype=torch.bool if name.endswith(("clipped", "limited", "clamped", "masked")) else kinds.get(name),
            )
            for name, value in values.items()
        }
    )


def test_kl_metrics_are_means_over_all_microbatches() -> None:
    behaviour, current, proximal = [-1.0, -2.0, -1.5], [-1.2, -1.5, -1.5], [-1.1, -2.0, -1.0]
    rows = [
        _outcomes(2, behaviour_logprobs=behaviour[:2], current_logprobs=current[:2], proximal_logprobs=proximal[:2]),
        _outcomes(1, behaviour_logprobs=behaviour[2:], current_logprobs=current[2:], proximal_logprobs=proximal[2:]),
    ]
    got = diagnose([rows])
    logs = [b - c for b, c in zip(behaviour, current, strict=True)]
    assert got["behaviour_kl_k1"] == pytest.approx(sum(logs) / 3)
    assert got["behaviour_kl_k3"] == pytest.approx(sum(math.exp(-d) - 1 + d for d in logs) / 3)
    logs = [p - c for p, c in zip(proximal, current, strict=True)]
    assert got["proximal_kl_k1"] == pytest.approx(sum(logs) / 3)
    assert got["proximal_kl_k3"] == pytest.approx(sum(math.exp(-d) - 1 + d for d in logs) / 3)


def test_mismatch_reads_fresh_tokens_of_the_first_minibatch() -> None:
    first = _outcomes(
        3, behaviour_logprobs=[-1.0, -1.0, -9.0], proximal_logprobs=[-1.1, -1.3, 0.0], staleness=[0, 0, 1]
    )
    second = _outcomes(1, behaviour_logprobs=[-5.0])
    got = diagnose([[first], [second]])
    assert got["mismatch_abs_mean"] == pytest.approx(0.2)
    assert got["mismatch_max"] == pytest.approx(0.3)
    assert math.isnan(diagnose([[_outcomes(1, staleness=[2])]])["mismatch_max"])


@pytest.mark.parametrize(
    ("ratios", "share"),
    [([0.7] * 3, 1.0), ([1.0, 1e-9, 1e-9, 1e-9], 0.25), ([3.0, 1.0], 16 / 20), ([3e30, 1e30], 16 / 20), ([], math.nan)],
)
def test_effective_sample_share_is_of_current_to_behaviour(ratios: list[float], share: float) -> None:
    """Whatever the loss makes of them: with `rule: ignore`, all weights of the loss are 1."""
    rows = _outcomes(len(ratios), current_logprobs=[math.log(ratio) for ratio in ratios])
    assert diagnose([[rows]])["effective_sample_share"] == pytest.approx(share, nan_ok=True)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_a_small_divergence_is_not_lost_in_rounding(size: float) -> None:
    """k3 of a small d is d^2 / 2; in float32, exp(-d) - 1 + d is 48 times this at 1e-5."""
    rows = _outcomes(2, behaviour_logprobs=[size, 0.0], current_logprobs=[0.0, size])
    assert diagnose([[rows]])["behaviour_kl_k3"] == pytest.approx(size**2 / 2, rel=1e-3, abs=0)


def test_the_k3_of_a_loss_is_not_lost_in_rounding() -> None:
    differences = torch.tensor([1e-3, -1e-4, 1e-5])
    expected = torch.expm1(-differences.double()) + differences.double()
    torch.testing.assert_close(kl_estimate(differences, torch.zeros(3), "k3").double(), expected, rtol=0.02, atol=0)


def test_behaviour_kl_is_split_by_staleness() -> None:
    rows = _outcomes(3, behaviour_logprobs=[-1.0] * 3, current_logprobs=[-1.0, -1.5, -2.0], staleness=[0, 1, 1])
    by_staleness = diagnose([[rows]])["behaviour_kl_by_staleness"]
    assert by_staleness.keys() == {0, 1}
    assert by_staleness[0] == 0
    assert by_staleness[1] == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(-1.0)) / 2)


def test_shares_means_and_extremes_equal_hand_computed_values() -> None:
    got = diagnose(
        [
            [
                _outcomes(
                    4,
                    ratio=[1.0, 2.0, 0.5, 0.5],
                    ratio_clipped=[0, 1, 0, 0],
                    ratio_limited=[0, 0, 0, 1],
                    behaviour_weight=[1.0, 0.0, 2.0, 1.0],
                    behaviour_weight_unbounded=[1.0, 9.0, 3.0, 1.0],
                    behaviour_weight_clamped=[0, 0, 1, 0],
                    behaviour_weight_masked=[0, 1, 0, 0],
                    entropy=[0.1, 0.2, 0.3, 0.4],
                )
            ]
        ]
    )
    assert (got["ratio_mean"], got["ratio_max"]) == (1.0, 2.0)
    assert (got["ratio_clipped_share"], got["ratio_limited_share"]) == (0.25, 0.25)
    assert (got["behaviour_weight_mean"], got["behaviour_weight_max"]) == (1.0, 9.0)
    assert (got["behaviour_weight_clamped_share"], got["behaviour_weight_masked_share"]) == (0.25, 0.25)
    assert got["entropy"] == pytest.approx(0.25)


def test_without_a_token_in_the_loss_all_metrics_are_nan() -> None:
    assert math.isnan(diagnose([[_outcomes(0)]])["entropy"])


def test_adaptive_coefficient_moves_at_most_a_fifth_per_horizon() -> None:
    config = AdaptiveKLConfig(target=0.1, horizon=1000)

    def after(divergence: float, num: int = 100) -> float:
        return adapted_coefficient(0.5, divergence=divergence, num_trajectories=num, config=config)

    assert after(0.1) == 0.5
    assert after(0.11) == pytest.approx(0.5 * (1 + 0.1 * 100 / 1000))
    assert after(5.0) == pytest.approx(0.5 * (1 + 0.2 * 0.1))
    assert after(0.0) == pytest.approx(0.5 * (1 - 0.2 * 0.1))
    assert after(-3.0, num=10**9) == 0.0
    assert after(math.nan) == 0.5
