"""Which expected gradients are exact on stale tokens: the benchmark of docs/algorithms.md, on fewer problems."""

from typing import Any

import pytest
import torch

from areal_rloo.algorithm.loss import policy_loss
from benchmarks import bias


@pytest.mark.parametrize("seed", range(3))
def test_only_the_product_over_a_sequence_corrects_stale_tokens_exactly(seed: int) -> None:
    fresh, stale = (bias.Problem.random(seed, distance) for distance in (0.0, 0.05))
    for name, config in bias.LOSSES.items():
        assert bias.compare_correction(fresh, config)["error"] < 1e-12
        error = bias.compare_correction(stale, config)["error"]
        assert error < 1e-12 if name == "sequence, product" else error > 0.1


@pytest.mark.parametrize("num_trajectories", [1, 5])
def test_the_product_is_exact_for_samples_of_one_trajectory(num_trajectories: int) -> None:
    """The reward depends on all trajectories of a sample, and the product is of each."""
    problem = bias.Problem.random(0, 0.05)
    theta = problem.current.clone().requires_grad_()
    behaviour, current = bias.logprobs(problem.behaviour), bias.logprobs(theta)
    samples, place = torch.arange(len(current))[:, None], torch.arange(bias.LENGTH)
    loss = policy_loss(
        behaviour_logprobs=behaviour.flatten(),
        proximal_logprobs=current.detach().flatten(),
        current_logprobs=current.flatten(),
        entropy=torch.zeros(current.numel()),
        advantages=problem.rewards[bias.OF_TOKENS],
        token_weights=behaviour.sum(1).exp()[bias.OF_TOKENS],
        staleness=torch.zeros_like(bias.OF_TOKENS),
        sequence_index=(samples * num_trajectories + place % num_trajectories).flatten(),
        config=bias.LOSSES["sequence, product"],
    ).loss
    (got,) = torch.autograd.grad(-loss, theta)
    (true,) = torch.autograd.grad((bias.logprobs(theta).sum(1).exp() * problem.rewards).sum(), theta)
    error = float((got - true).norm() / true.norm())
    assert error < 1e-12 if num_trajectories == 1 else error > 0.1


@pytest.mark.parametrize("term", [("k2", "weight"), ("k3", "weight"), ("k1", "gradient"), ("k3", "gradient")])
def test_a_corrected_kl_is_exact_if_the_prefix_is_corrected(term: tuple[str, str]) -> None:
    problem = bias.Problem.random(0, 0.05)
    errors: dict[str, Any] = {name: bias.compare_kl(problem, config, *term) for name, config in bias.LOSSES.items()}
    assert errors["sequence, product"]["error"] < 1e-12
    assert errors["token"]["error"] < bias.compare_kl(problem, bias.LOSSES["token"], term[0], "none")["error"]


def test_a_kl_in_the_loss_ignores_what_a_token_does_to_later_ones() -> None:
    compared = bias.compare_placements(bias.Problem.random(0, 0.0))
    assert compared["k1 in the reward"]["error"] < 1e-12
    assert compared["k2 in the loss"]["error"] > 0.3


def test_samples_lost_at_random_bias_nothing_and_others_do() -> None:
    problem = bias.Problem.random(0, 0.0)
    errors = {name: bias.compare_lost(problem, lost)["error"] for name, lost in bias.LOST.items()}
    assert errors.pop("half of all") < 1e-12
    assert min(errors.values()) > 0.05
