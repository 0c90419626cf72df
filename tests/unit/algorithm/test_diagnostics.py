"""Test the diagnostics of a step against hand-computed values."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from areal_rloo.algorithm.diagnostics import Sums, diagnose, measure
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
    got = diagnose([[measure(row) for row in rows]])
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
    got = diagnose([[measure(first)], [measure(second)]])
    assert got["mismatch_abs_mean"] == pytest.approx(0.2)
    assert got["mismatch_max"] == pytest.approx(0.3)
    assert math.isnan(diagnose([[measure(_outcomes(1, staleness=[2]))]])["mismatch_max"])


@pytest.mark.parametrize(
    ("ratios", "share"),
    [([0.7] * 3, 1.0), ([1.0, 1e-9, 1e-9, 1e-9], 0.25), ([3.0, 1.0], 16 / 20), ([3e30, 1e30], 16 / 20), ([], math.nan)],
)
def test_effective_sample_share_is_of_current_to_behaviour(ratios: list[float], share: float) -> None:
    """Whatever the loss makes of them: with `rule: ignore`, all weights of the loss are 1."""
    rows = _outcomes(len(ratios), current_logprobs=[math.log(ratio) for ratio in ratios])
    assert diagnose([[measure(rows)]])["effective_sample_share"] == pytest.approx(share, nan_ok=True)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_a_small_divergence_is_not_lost_in_rounding(size: float) -> None:
    """k3 of a small d is d^2 / 2; in float32, exp(-d) - 1 + d is 48 times this at 1e-5."""
    rows = _outcomes(2, behaviour_logprobs=[size, 0.0], current_logprobs=[0.0, size])
    assert diagnose([[measure(rows)]])["behaviour_kl_k3"] == pytest.approx(size**2 / 2, rel=1e-3, abs=0)


def test_the_k3_of_a_loss_is_not_lost_in_rounding() -> None:
    differences = torch.tensor([1e-3, -1e-4, 1e-5])
    expected = torch.expm1(-differences.double()) + differences.double()
    torch.testing.assert_close(kl_estimate(differences, torch.zeros(3), "k3").double(), expected, rtol=0.02, atol=0)


def test_behaviour_kl_is_split_by_staleness() -> None:
    rows = _outcomes(3, behaviour_logprobs=[-1.0] * 3, current_logprobs=[-1.0, -1.5, -2.0], staleness=[0, 1, 1])
    by_staleness = diagnose([[measure(rows)]])["behaviour_kl_by_staleness"]
    assert by_staleness.keys() == {0, 1}
    assert by_staleness[0] == 0
    assert by_staleness[1] == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(-1.0)) / 2)


def test_shares_means_and_extremes_equal_hand_computed_values() -> None:
    tokens = _outcomes(
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
    got = diagnose([[measure(tokens)]])
    assert (got["ratio_mean"], got["ratio_max"]) == (1.0, 2.0)
    assert (got["ratio_clipped_share"], got["ratio_limited_share"]) == (0.25, 0.25)
    assert (got["behaviour_weight_mean"], got["behaviour_weight_max"]) == (1.0, 9.0)
    assert (got["behaviour_weight_clamped_share"], got["behaviour_weight_masked_share"]) == (0.25, 0.25)
    assert got["entropy"] == pytest.approx(0.25)


def test_without_a_token_in_the_loss_all_metrics_are_nan() -> None:
    assert math.isnan(diagnose([[measure(_outcomes(0))]])["entropy"])


def _random_outcomes(rng: np.random.Generator, num: int) -> TokenOutcomes:
    floats = {name: rng.normal(size=num).astype(np.float32) for name in TokenOutcomes._fields}
    bools = {
        name: rng.random(num) < 0.3 for name in floats if name.endswith(("clipped", "limited", "clamped", "masked"))
    }
    staleness = rng.integers(0, 4, num).astype(np.int32)
    return TokenOutcomes(**{n: torch.from_numpy(v) for n, v in {**floats, **bools, "staleness": staleness}.items()})


def _obvious(first: TokenOutcomes, tokens: TokenOutcomes) -> dict[str, Any]:
    """Every number from columns of all tokens at once; `first` are those of the first minibatch."""
    of = {name: values.numpy().astype(np.float64) for name, values in tokens._asdict().items()}
    ratio = np.exp(of["current_logprobs"] - of["behaviour_logprobs"])
    k3 = ratio - 1 - np.log(ratio)
    to_proximal = of["proximal_logprobs"] - of["current_logprobs"]
    gap = (first.behaviour_logprobs - first.proximal_logprobs).abs()[first.staleness == 0].double().numpy()
    return {
        "entropy": of["entropy"].mean(),
        "ratio_mean": of["ratio"].mean(),
        "ratio_max": of["ratio"].max(),
        "ratio_clipped_share": of["ratio_clipped"].mean(),
        "ratio_limited_share": of["ratio_limited"].mean(),
        "behaviour_weight_mean": of["behaviour_weight"].mean(),
        "behaviour_weight_max": of["behaviour_weight_unbounded"].max(),
        "behaviour_weight_clamped_share": of["behaviour_weight_clamped"].mean(),
        "behaviour_weight_masked_share": of["behaviour_weight_masked"].mean(),
        "effective_sample_share": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "behaviour_kl_k1": -np.log(ratio).mean(),
        "behaviour_kl_k3": k3.mean(),
        "behaviour_kl_by_staleness": {int(v): k3[of["staleness"] == v].mean() for v in np.unique(of["staleness"])},
        "proximal_kl_k1": to_proximal.mean(),
        "proximal_kl_k3": (np.exp(-to_proximal) - 1 + to_proximal).mean(),
        "mismatch_abs_mean": gap.mean() if len(gap) else math.nan,
        "mismatch_max": gap.max() if len(gap) else math.nan,
    }


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_ranks_give_the_numbers_of_all_tokens(seed: int) -> None:
    """Whatever the ranks and minibatches, some without a token."""
    rng = np.random.default_rng(seed)
    num_ranks, num_minibatches = rng.integers(1, 5, 2)
    split = [[_random_outcomes(rng, rng.integers(0, 30)) for _ in range(num_ranks)] for _ in range(num_minibatches)]
    split[-1][-1] = _random_outcomes(rng, 5)
    sent = [[msgspec.msgpack.encode(measure(tokens)) for tokens in minibatch] for minibatch in split]
    assert max(len(each) for minibatch in sent for each in minibatch) < 1024, "a few numbers, no column"
    got = diagnose([[msgspec.msgpack.decode(each, type=Sums) for each in minibatch] for minibatch in sent])
    tokens = TokenOutcomes.joined([part for minibatch in split for part in minibatch])
    expected = _obvious(TokenOutcomes.joined(split[0]), tokens)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), name


def test_a_number_of_a_rank_that_is_not_finite_stays() -> None:
    broken = _outcomes(1, current_logprobs=[math.nan], ratio=[math.nan])
    got = diagnose([[measure(_outcomes(2)), measure(broken)]])
    assert all(
        math.isnan(got[name]) for name in ("ratio_max", "ratio_mean", "behaviour_kl_k3", "effective_sample_share")
    )
    assert got["entropy"] == 0.0


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
