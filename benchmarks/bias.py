"""Measure the bias of the loss on stale tokens exactly: a policy so small that every completion can be enumerated.

    python -m benchmarks.bias [--output FILE.json]

A completion is 5 tokens of a vocabulary of 3. After each prefix the policy has a separate softmax, and each completion
has a random reward. The current policy is a random step away from the behaviour policy, which sampled the tokens. The
expected gradient is the gradient of `policy_loss` over all 243 completions, weighted by probability. The true gradient
is the gradient of the expected reward. Four tables, means of 20 random problems each:

    corrections  the expected gradient of a loss against the true gradient, by distance in nats a token
    kl           the expected gradient of a KL term against the gradient of a KL, by distance
    placements   a KL of fresh tokens in the reward and in the loss against the gradient of the KL of completions
    lost         the expected gradient if some completions are never answered, without any staleness
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_rloo.algorithm.kl import KLTerm
from areal_rloo.algorithm.loss import policy_loss
from areal_rloo.config import BehaviourWeightConfig, KLConfig, LossConfig
from benchmarks import hardware

VOCABULARY, LENGTH, NUM_PROBLEMS = 3, 5, 20
DISTANCES = (0.0, 0.0017, 0.015, 0.15)  # KL(behaviour, current) in nats a token
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # [num_sequences, LENGTH]


def _nodes() -> Tensor:
    """Number the prefix before each token, [num_sequences, LENGTH]."""
    columns, first, index = [], 0, torch.zeros(len(SEQUENCES), dtype=torch.int64)
    for place in range(LENGTH):
        columns.append(first + index)
        first += VOCABULARY**place
        index = index * VOCABULARY + SEQUENCES[:, place]
    return torch.stack(columns, 1)


NODES = _nodes()
OF_TOKENS = torch.arange(len(SEQUENCES)).repeat_interleave(LENGTH)


def _weight(**settings: Any) -> LossConfig:
    return LossConfig(behaviour_weight=BehaviourWeightConfig(**({"upper": None} | settings)))


LOSSES: Mapping[str, LossConfig] = {
    "token": _weight(rule="none"),
    "token, clamp 5": _weight(rule="clamp", upper=5.0),
    "token, clamp 1.5": _weight(rule="clamp", upper=1.5),
    "token, mask 1.5": _weight(rule="mask", upper=1.5),
    "sequence, product": _weight(rule="none", level="sequence", aggregate="sum"),
    "sequence, mean": _weight(rule="none", level="sequence", aggregate="mean"),
    "ignore": _weight(rule="ignore"),
    "decoupled: false": LossConfig(decoupled=False),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Logits [num_prefixes, VOCABULARY] of three policies, and a reward for each sequence; all float64."""

    behaviour: Tensor
    current: Tensor
    reference: Tensor
    rewards: Tensor

    @classmethod
    def random(cls, seed: int, distance: float) -> Problem:
        """Make a problem in which the current policy is `distance` nats a token away."""
        generator = torch.Generator().manual_seed(seed)
        shape = (int(NODES.max()) + 1, VOCABULARY)
        behaviour, step, reference = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
        rewards = torch.randn(len(SEQUENCES), dtype=torch.float64, generator=generator)
        low, high = 0.0, 10.0
        for _ in range(60 if distance > 0 else 0):
            middle = (low + high) / 2
            far = float(_divergence(behaviour, behaviour + middle * step)) / LENGTH > distance
            low, high = (low, middle) if far else (middle, high)
        return cls(behaviour, behaviour + low * step, reference, rewards)


def logprobs(logits: Tensor) -> Tensor:
    """Return the logprob of every token, [num_sequences, LENGTH]."""
    return logits.log_softmax(-1)[NODES, SEQUENCES]


def _probabilities(logits: Tensor) -> Tensor:
    return logprobs(logits).sum(1).exp()


def _divergence(logits: Tensor, others: Tensor) -> Tensor:
    own = logprobs(logits).sum(1)
    return (own.exp() * (own - logprobs(others).sum(1))).sum()


def expected_loss(
    problem: Problem, theta: Tensor, config: LossConfig, advantages: Tensor, kl: KLConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Return the expected loss of a completion, and the logprobs [num_tokens] by which it was computed.

    `advantages`: [num_sequences]. The sum of the tokens of a completion counts, so no length can bias the gradient.
    """
    behaviour, current = logprobs(problem.behaviour).flatten(), logprobs(theta).flatten()
    loss = policy_loss(
        behaviour_logprobs=behaviour,
        proximal_logprobs=current.detach(),
        current_logprobs=current,
        entropy=torch.zeros_like(behaviour),
        advantages=advantages[OF_TOKENS],
        token_weights=_probabilities(problem.behaviour)[OF_TOKENS],
        staleness=torch.zeros_like(OF_TOKENS),
        sequence_index=OF_TOKENS,
        config=config,
        kl=None if kl is None else KLTerm(logprobs(problem.reference).flatten(), 1.0, kl),
    ).loss
    return loss, current


def compare_correction(problem: Problem, config: LossConfig) -> dict[str, float]:
    """Compare the expected gradient with the true gradient.

    The baseline is the expectation of RLOO's: the mean reward of the behaviour policy's completions. `variance` is the
    variance of the gradient of one completion, divided by the same for a completion of the current policy.
    """
    theta = problem.current.clone().requires_grad_()
    (true,) = torch.autograd.grad((_probabilities(theta) * problem.rewards).sum(), theta)
    got, variance = _gradient(problem, theta, config)
    fresh = Problem(problem.current, problem.current, problem.reference, problem.rewards)
    return _compared(got, true) | {"variance": variance / _gradient(fresh, theta, config)[1]}


def _gradient(problem: Problem, theta: Tensor, config: LossConfig) -> tuple[Tensor, float]:
    probabilities = _probabilities(problem.behaviour)
    loss, current = expected_loss(problem, theta, config, problem.rewards - (probabilities * problem.rewards).sum())
    gradient, by_logprob = torch.autograd.grad(-loss, (theta, current))
    # Each prefix has logits of its own, so the squares of the tokens' gradients add up.
    policy = theta.detach().softmax(-1)[NODES]
    squares = (torch.nn.functional.one_hot(SEQUENCES, VOCABULARY) - policy).square().sum(-1)
    of_completion = (by_logprob.view(-1, LENGTH) / probabilities[:, None]).square() * squares
    return gradient, float((probabilities * of_completion.sum(1)).sum() - gradient.square().sum())


def compare_kl(problem: Problem, config: LossConfig, estimator: str, correction: str) -> dict[str, float]:
    """Compare the expected gradient of a KL term with that of a KL of the tokens after the current policy's prefixes.

    The KL is KL(current, reference), or for k3 without a gradient of its weight KL(reference, current).
    """
    theta = problem.current.clone().requires_grad_()
    settings: Any = {"estimator": estimator, "correction": correction, "placement": "loss"}
    no_reward = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    loss, _ = expected_loss(problem, theta, config, no_reward, KLConfig(**settings))
    occupied = torch.zeros(len(theta), dtype=torch.float64)
    occupied.index_add_(0, NODES.flatten(), _probabilities(problem.current)[OF_TOKENS])
    one, other = theta.log_softmax(-1), problem.reference.log_softmax(-1)
    if estimator == "k3" and correction != "gradient":
        one, other = other, one
    divergence = (occupied * (one.exp() * (one - other)).sum(-1)).sum()
    return _compared(*(torch.autograd.grad(value, theta)[0] for value in (loss, divergence)))


def compare_placements(problem: Problem) -> dict[str, dict[str, float]]:
    """Compare the KLs of `kl.placement` on fresh tokens with the gradient of KL(current, reference) of completions."""
    theta = problem.current.clone().requires_grad_()
    fresh = Problem(problem.current, problem.current, problem.reference, problem.rewards)
    k1 = (logprobs(problem.current) - logprobs(problem.reference)).sum(1)
    no_reward = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    losses = {
        "k1 in the reward": expected_loss(fresh, theta, LOSSES["token"], -k1)[0],
        "k2 in the loss": expected_loss(
            fresh, theta, LOSSES["token"], no_reward, KLConfig(estimator="k2", placement="loss")
        )[0],
    }
    (true,) = torch.autograd.grad(_divergence(theta, problem.reference), theta)
    return {name: _compared(torch.autograd.grad(loss, theta)[0], true) for name, loss in losses.items()}


def compare_lost(problem: Problem, lost_share: Callable[[Problem], Tensor]) -> dict[str, float]:
    """Compare the gradient of the completions that arrive with the true gradient; lost_share of each never arrives."""
    theta = problem.behaviour.clone().requires_grad_()
    (true,) = torch.autograd.grad((_probabilities(theta) * problem.rewards).sum(), theta)
    arrives = _probabilities(problem.behaviour) * (1 - lost_share(problem))
    arrives = arrives / arrives.sum()
    advantages = problem.rewards - (arrives * problem.rewards).sum()
    (got,) = torch.autograd.grad((arrives * advantages * logprobs(theta).sum(1)).sum(), theta)
    return _compared(got, true)


def _compared(got: Tensor, true: Tensor) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), true.flatten(), dim=0)
    return {
        "error": float((got - true).norm() / true.norm()),
        "size": float(got.norm() / true.norm()),
        "cosine": float(cosine),
    }


def _likeliest(problem: Problem) -> Tensor:
    probabilities = _probabilities(problem.behaviour)
    return 0.5 * (probabilities == probabilities.max()).double()


def _best(problem: Problem) -> Tensor:
    return 0.5 * (problem.rewards > problem.rewards.median()).double()


def _any(problem: Problem) -> Tensor:
    return torch.full_like(problem.rewards, 0.5)


LOST: Mapping[str, Callable[[Problem], Tensor]] = {
    "half of the likeliest completion": _likeliest,
    "half of the better half": _best,
    "half of all": _any,
}
KL_TERMS = (("k2", "weight"), ("k3", "weight"), ("k1", "gradient"), ("k3", "gradient"), ("k2", "none"), ("k3", "none"))


def _mean(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {name: float(f"{sum(row[name] for row in rows) / len(rows):.3g}") for name in rows[0]}


def tables() -> dict[str, list[dict[str, Any]]]:
    """Compute all tables."""
    problems = {d: [Problem.random(seed, d) for seed in range(NUM_PROBLEMS)] for d in DISTANCES}
    corrections: list[dict[str, Any]] = [
        {"loss": name, "distance": distance} | _mean([compare_correction(problem, config) for problem in of_distance])
        for name, config in LOSSES.items()
        for distance, of_distance in problems.items()
    ]
    kl: list[dict[str, Any]] = [
        {"loss": name, "estimator": estimator, "correction": correction, "distance": distance}
        | _mean([compare_kl(problem, LOSSES[name], estimator, correction) for problem in of_distance])
        for name in ("token", "sequence, product")
        for estimator, correction in KL_TERMS
        for distance, of_distance in problems.items()
    ]
    lost: list[dict[str, Any]] = [
        {"lost": name} | _mean([compare_lost(problem, lost_share) for problem in problems[0.0]])
        for name, lost_share in LOST.items()
    ]
    placed = [compare_placements(problem) for problem in problems[0.0]]
    placements: list[dict[str, Any]] = [
        {"placement": name} | _mean([compared[name] for compared in placed]) for name in placed[0]
    ]
    return {"corrections": corrections, "kl": kl, "placements": placements, "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    arguments = parser.parse_args()
    result = tables()
    for name, rows in result.items():
        print(name)
        for row in rows:
            print("  ", *(f"{key}={value}" for key, value in row.items()))
    hardware.write(arguments.output, {"vocabulary": VOCABULARY, "length": LENGTH, "problems": NUM_PROBLEMS, **result})


if __name__ == "__main__":
    main()
