"""The numbers of a train step as a record has them: of its batch, and of what the step did with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from areal_rloo.learner.train_step import StepResult
from areal_rloo.trajectory import Group


def batch_numbers(batch: Sequence[Group]) -> dict[str, Any]:
    """Rewards as the task gave them, lengths and endings, by field of TrainRecord."""
    trajectories = [trajectory for group in batch for trajectory in group.trajectories]
    samples = [sample for group in batch for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(trajectory.completion.tokens) for trajectory in trajectories])
    lower, median, upper = np.quantile(rewards, [0.1, 0.5, 0.9])
    equal = [len({trajectory.reward for trajectory in group.trajectories}) == 1 for group in batch]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_lower_decile": float(lower),
        "reward_median": float(median),
        "reward_upper_decile": float(upper),
        "reward_parts": _means((name, value) for sample in samples for name, value in sample.reward_parts.items()),
        "reward_by_source": _means((group.source, sample.reward) for group in batch for sample in group.samples),
        "zero_variance_group_share": sum(equal) / len(equal),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        "truncated_share": float(np.mean([t.completion.finish_reason == "length" for t in trajectories])),
        "spanning_share": float(np.mean([len(np.unique(t.completion.versions)) > 1 for t in trajectories])),
    }


def _means(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in named:
        values.setdefault(name, []).append(value)
    return {name: float(np.mean(every)) for name, every in values.items()}


def step_numbers(result: StepResult) -> dict[str, Any]:
    """What the step did, by field of TrainRecord."""
    staleness = result.staleness_tokens
    num_all = max(1, result.num_tokens + result.num_stale_tokens + result.num_truncated_tokens)
    return {
        "loss": result.loss,
        "gradient_norm": result.gradient_norm,
        "learning_rate": result.learning_rate,
        "kl_coefficient": result.kl_coefficient,
        "reference_kl_k1": result.reference_kl_k1,
        "reference_kl_k3": result.reference_kl_k3,
        "num_limited_rewards": result.num_limited_rewards,
        "advantage_mean": result.advantage_mean,
        "advantage_std": result.advantage_std,
        "advantage_min": result.advantage_min,
        "advantage_max": result.advantage_max,
        "advantage_abs_mean": result.advantage_abs_mean,
        "staleness_mean": sum(s * n for s, n in staleness.items()) / max(1, result.num_tokens),
        "staleness_max": max(staleness, default=0),
        "staleness_tokens": dict(staleness),
        "masked_token_share": result.num_stale_tokens / num_all,
        "truncated_token_share": result.num_truncated_tokens / num_all,
        "trained_tokens": result.num_tokens,
        "train_step_s": result.train_step_s,
        "times_s": result.times,
        "learner_tokens_per_s": result.num_computed_tokens / max(1e-9, result.train_step_s),
        "model_flops_share": result.model_flops_share,
        **dataclasses.asdict(result.policy),
    }
