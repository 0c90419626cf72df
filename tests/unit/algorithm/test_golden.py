"""Compare our mathematics with reference values computed by the functions of other systems.

Values agree to 1e-6, except for the differences documented here, each with the value we consider correct.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from support.token_weights import token_weights
from torch import Tensor

from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.loss import policy_loss
from areal_rloo.algorithm.normalization import normalize
from areal_rloo.config import (
    PRESETS,
    AlgorithmConfig,
    BehaviourWeightConfig,
    LossConfig,
    NormConfig,
    PresetName,
)

Case = dict[str, Any]


def _preset(name: PresetName) -> AlgorithmConfig:
    return msgspec.convert(PRESETS[name], AlgorithmConfig)


NORMS = {name: _preset(name).adv_norm for name in ("rloo", "grpo", "dr_grpo")}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def _named(cases: list[Case], name: str) -> list[Case]:
    """Return the numbered cases of a name."""
    return _some([case for case in cases if case["name"].rpartition("-")[0] == name], name)


def _of_kind(cases: list[Case], kind: str) -> list[Case]:
    """Return the cases of a kind, with any settings."""
    return _some([case for case in cases if case["name"].partition("-")[0] == kind], kind)


def _some(found: list[Case], what: str) -> list[Case]:
    if not found:
        pytest.skip(f"no case {what} among the reference values")
    return found


def _float64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _close(got: Tensor, expected: object, what: str) -> None:
    message: Callable[[str], str] = lambda text: f"{what}: {text}"  # noqa: E731
    torch.testing.assert_close(got.double(), _float64(expected), rtol=1e-6, atol=2e-7, msg=message)


def _tokens(case: Case) -> tuple[Callable[[str], Tensor], Tensor]:
    """Return a reader of per-token arrays without padding, and the trajectory of each token."""
    lengths = case["inputs"]["lengths"]

    def read(name: str) -> Tensor:
        return _float64([v for row, n in zip(case["inputs"][name], lengths, strict=True) for v in row[:n]])

    return read, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _alone(groups: Tensor) -> Tensor:
    """Return True for trajectories alone in their group."""
    return (groups[:, None] == groups).sum(1) == 1


def _compare_advantages(case: Case, rewards: Tensor, norm: NormConfig) -> None:
    """Check that groups of one give 0 and all others the expected values."""
    groups = torch.tensor(case["inputs"]["group"])
    got, alone = normalize(rewards, groups, torch.ones_like(groups), norm), _alone(groups)
    assert torch.count_nonzero(got[alone]) == 0
    _close(got[~alone], _float64(case["expected"]["advantage_per_trajectory"])[~alone].tolist(), case["name"])


def _loss(case: Case, *, anchor: str, behaviour: str, config: LossConfig) -> Tensor:
    read, sequence = _tokens(case)
    weights = token_weights(
        torch.ones(len(sequence), dtype=torch.bool),
        sequence,
        max_new_tokens=1,
        config=config,
    )
    return policy_loss(
        behaviour_logprobs=read(behaviour),
        proximal_logprobs=read(anchor),
        current_logprobs=read("current_logprobs"),
        entropy=torch.zeros(len(sequence)),
        advantages=_float64(case["inputs"]["advantages"])[sequence],
        token_weights=weights,
        staleness=torch.zeros_like(sequence),
        sequence_index=sequence,
        config=config,
    ).loss


def test_every_golden_case_has_a_test(golden_cases: list[Case]) -> None:
    looked_at = {*NORMS, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "kl", "rloo-kl-in-reward"}
    looked_at |= {f"aggregate-{name.replace('_', '-')}" for name in AGGREGATIONS} | {"trl_rloo_loss"}
    for case in golden_cases:
        name, kind = case["name"].rpartition("-")[0], case["name"].partition("-")[0]
        assert name in looked_at or kind in {"ppo_clip", "decoupled"}, case["name"]


@pytest.mark.parametrize("name", NORMS)
def test_advantages_equal_the_golden_values(golden_cases: list[Case], name: str) -> None:
    """Groups of one differ on purpose: without other samples there is no baseline, so we give 0. verl passes the raw
    reward on, which is not an advantage."""
    for case in _named(golden_cases, name):
        _compare_advantages(case, _float64(case["inputs"]["rewards"]), NORMS[name])


def test_kl_estimators_equal_the_golden_values(golden_cases: list[Case]) -> None:
    """verl clamps k3 to at most 10; ours is the estimator itself, made finite far beyond that."""
    for case in _named(golden_cases, "kl"):
        read, _ = _tokens(case)
        for ours, theirs in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")):
            got = kl_estimate(read("current_logprobs"), read("reference_logprobs"), ours)  # type: ignore[arg-type]
            got = got.clamp(max=10) if ours == "k3" else got
            rows = zip(case["expected"][theirs], case["inputs"]["lengths"], strict=True)
            _close(got, [value for row, num in rows for value in row[:num]], f"{case['name']} {ours}")


def test_rloo_with_kl_in_the_reward_equals_the_golden_values(golden_cases: list[Case]) -> None:
    for case in _named(golden_cases, "rloo-kl-in-reward"):
        read, sequence = _tokens(case)
        rewards = _float64(case["inputs"]["rewards"])
        per_token = kl_estimate(read("current_logprobs"), read("reference_logprobs"), "k1")
        rewards = rewards - case["inputs"]["kl_coef"] * torch.zeros_like(rewards).scatter_add(0, sequence, per_token)
        _compare_advantages(case, rewards, NORMS["rloo"])


WHITENED = _preset("reinforce_plus_plus").adv_norm


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_over_tokens_equals_the_golden_values(golden_cases: list[Case], name: str) -> None:
    """Groups of one differ on purpose, as above; verl's raw reward takes their place here, to compare the others."""
    for case in _named(golden_cases, name):
        values, groups = _float64(case["inputs"]["rewards"]), torch.tensor(case["inputs"]["group"])
        lengths = torch.tensor(case["inputs"]["lengths"])
        if name.endswith("baseline"):
            centred = normalize(values, groups, lengths, NormConfig(mean_level="group"))
            alone = _alone(groups)
            assert torch.count_nonzero(centred[alone]) == 0
            values = torch.where(alone, values, centred)
        got = normalize(values, groups, lengths, WHITENED)
        for row, advantage, length in zip(case["expected"]["advantage_per_token"], got, lengths, strict=True):
            _close(advantage.expand(int(length)), row[:length], case["name"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_equal_the_golden_values(golden_cases: list[Case], aggregation: str) -> None:
    """verl's seq-mean-token-sum-norm omits the mean over sequences of Dr. GRPO (arXiv:2503.20783). verl's value is the
    number of sequences times ours."""
    for case in _named(golden_cases, f"aggregate-{aggregation.replace('_', '-')}"):
        read, sequence = _tokens(case)
        num_sequences = len(case["inputs"]["lengths"])
        weights = token_weights(
            torch.ones(len(sequence), dtype=torch.bool),
            sequence,
            max_new_tokens=case["inputs"]["padded_length"],
            config=LossConfig(aggregation=aggregation),  # type: ignore[arg-type]
        )
        got = (weights.double() * read("values")).sum()
        _close(got * (num_sequences if aggregation.endswith("norm") else 1), case["expected"], case["name"])


def test_two_clip_bounds_and_dual_clip_equal_the_golden_values(golden_cases: list[Case]) -> None:
    for case in _of_kind(golden_cases, "ppo_clip"):
        inputs = case["inputs"]
        config = LossConfig(eps_low=inputs["eps_low"], eps_high=inputs["eps_high"], dual_clip=inputs["dual_clip"])
        loss = _loss(case, anchor="proximal_logprobs", behaviour="proximal_logprobs", config=config)
        _close(loss, case["expected"]["loss"], case["name"])


def test_decoupled_loss_and_rules_equal_the_golden_values(golden_cases: list[Case]) -> None:
    for case in _of_kind(golden_cases, "decoupled"):
        inputs = case["inputs"]
        cap, rule = inputs["behaviour_weight_cap"], case["name"].split("-")[1]
        weight = BehaviourWeightConfig(rule="none") if cap is None else BehaviourWeightConfig(rule=rule, upper=cap)
        config = LossConfig(eps_low=inputs["eps"], eps_high=inputs["eps"], behaviour_weight=weight)
        loss = _loss(case, anchor="proximal_logprobs", behaviour="behaviour_logprobs", config=config)
        _close(loss, case["expected"]["loss"], case["name"])


def test_rloo_with_sequence_ratios_equals_the_golden_values(golden_cases: list[Case]) -> None:
    for case in _named(golden_cases, "trl_rloo_loss"):
        epsilon = case["inputs"]["epsilon"]
        config = msgspec.structs.replace(_preset("rloo_trl").loss, eps_low=epsilon, eps_high=epsilon)
        loss = _loss(case, anchor="old_logprobs", behaviour="old_logprobs", config=config)
        _close(loss, case["expected"]["loss"], case["name"])
