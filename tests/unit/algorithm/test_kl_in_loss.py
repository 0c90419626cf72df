"""Test the gradient of a KL in the loss on stale tokens, exactly, on a bandit.

An old behaviour policy, a proximal policy and a current policy softmax(theta) choose one of a few arms. The expected
gradient of the loss is the gradient of the loss of all arms, each with the behaviour policy's probability as weight.
"""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from areal_rloo.algorithm.kl import KLTerm
from areal_rloo.algorithm.loss import policy_loss
from areal_rloo.config import BehaviourWeightConfig, KLConfig, LossConfig

NO_BOUND = BehaviourWeightConfig(rule="none", upper=None)
LOSSES = {
    "decoupled": LossConfig(behaviour_weight=NO_BOUND),
    "sequences": LossConfig(
        behaviour_weight=BehaviourWeightConfig(rule="none", level="sequence", aggregate="sum", upper=None),
        ratio_level="sequence_sum",
    ),
    "naive": LossConfig(decoupled=False),
}
DIRECTION = {"k2": "current to reference", "k3": "reference to current"}


def _policies(distance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the logits of behaviour, proximal, current and reference, with KL(behaviour, current) = distance."""
    generator = torch.Generator().manual_seed(0)
    behaviour, step, reference = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    low, high = 0.0, 10.0
    for _ in range(100 if distance > 0 else 0):
        size = (low + high) / 2
        far = _kl(behaviour, behaviour + size * step) > distance
        low, high = (low, size) if far else (size, high)
    return behaviour, behaviour + 0.7 * low * step, behaviour + low * step, reference


def _kl(logits: Tensor, others: Tensor) -> Tensor:
    logs, theirs = logits.log_softmax(0), others.log_softmax(0)
    return (logs.exp() * (logs - theirs)).sum()


def _expected(distance: float, loss: LossConfig, kl: KLConfig) -> dict[str, Tensor]:
    """Return the expected gradient of the KL term, and the gradients of both KLs."""
    behaviour, proximal, theta, reference = _policies(distance)
    theta.requires_grad_()
    arms = torch.arange(len(theta))
    term = policy_loss(
        behaviour_logprobs=behaviour.log_softmax(0),
        proximal_logprobs=proximal.log_softmax(0),
        current_logprobs=theta.log_softmax(0),
        entropy=torch.zeros(len(arms)),
        advantages=torch.zeros(len(arms)),
        token_weights=behaviour.softmax(0),
        staleness=torch.zeros_like(arms),
        sequence_index=arms,
        config=loss,
        kl=KLTerm(reference.log_softmax(0), 1.0, kl),
    ).loss
    values = {
        "term": term,
        "current to reference": _kl(theta, reference),
        "reference to current": _kl(reference, theta),
    }
    return {name: torch.autograd.grad(value, theta)[0] for name, value in values.items()}


def _kl_config(estimator: str, correction: str) -> KLConfig:
    settings: Any = {"estimator": estimator, "correction": correction}
    return KLConfig(placement="loss", **settings)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("distance", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("estimator", DIRECTION)
def test_a_weighted_divergence_has_the_gradient_of_a_kl(
    estimator: Literal["k2", "k3"], distance: float, loss: str
) -> None:
    got = _expected(distance, LOSSES[loss], _kl_config(estimator, "weight"))
    torch.testing.assert_close(got["term"], got[DIRECTION[estimator]], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_weight_with_a_gradient_gives_the_reverse_kl(estimator: str, loss: str) -> None:
    """As in DeepSeek-V3.2: the estimate is unbiased, and with it the gradient."""
    got = _expected(0.1, LOSSES[loss], _kl_config(estimator, "gradient"))
    torch.testing.assert_close(got["term"], got["current to reference"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", DIRECTION)
def test_without_a_correction_stale_tokens_bias_the_gradient(estimator: str) -> None:
    fresh = _expected(0.0, LOSSES["decoupled"], _kl_config(estimator, "none"))
    torch.testing.assert_close(fresh["term"], fresh[DIRECTION[estimator]], rtol=1e-12, atol=1e-14)
    stale = _expected(0.1, LOSSES["decoupled"], _kl_config(estimator, "none"))
    expected = stale[DIRECTION[estimator]]
    assert float((stale["term"] - expected).norm() / expected.norm()) > 0.1


def test_a_masked_token_has_no_divergence_either() -> None:
    mask = LossConfig(behaviour_weight=BehaviourWeightConfig(rule="mask", upper=1e-9))
    assert _expected(0.1, mask, _kl_config("k2", "weight"))["term"].count_nonzero() == 0


@pytest.mark.parametrize("correction", ["weight", "gradient"])
def test_the_kl_of_a_token_has_the_ratio_of_the_token(correction: str) -> None:
    """Also where the ratio of the objective is of the whole sequence."""
    behaviour, proximal, current, reference = (values.log_softmax(0) for values in _policies(0.1))

    def gradient(ratio_level: Literal["token", "sequence_sum"]) -> Tensor:
        leaf = current.clone().requires_grad_()
        output = policy_loss(
            behaviour_logprobs=behaviour,
            proximal_logprobs=proximal,
            current_logprobs=leaf,
            entropy=torch.zeros(len(leaf)),
            advantages=torch.zeros(len(leaf)),
            token_weights=torch.ones(len(leaf)),
            staleness=torch.zeros(len(leaf), dtype=torch.int64),
            sequence_index=torch.zeros(len(leaf), dtype=torch.int64),
            config=LossConfig(ratio_level=ratio_level),
            kl=KLTerm(reference, 1.0, _kl_config("k3", correction)),
        )
        return torch.autograd.grad(output.loss, leaf)[0]

    torch.testing.assert_close(gradient("sequence_sum"), gradient("token"))
