"""From the trajectories of a batch to an advantage for every token of them.

    rewards ─► shaped ─► less their KL to the reference ─► reward_norm ─► adv_norm ─► spread over the tokens
    returns=token:    shaped ─► reward_norm ─► per-token rewards, less the KL ─► discounted returns ─► adv_norm

Norms see the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_rloo.algorithm.advantage import normalize
from areal_rloo.algorithm.kl import Estimator, kl_estimate
from areal_rloo.algorithm.rewards import REWARD_LIMIT, shape_rewards, token_returns
from areal_rloo.algorithm.turns import written_by_policy
from areal_rloo.config import Config, NormConfig
from areal_rloo.trajectory import SampleId, Trajectory


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the loss is given of a batch.

    Attributes:
        of_tokens: of each trajectory [num_completion_tokens] float32.
        num_limited: rewards beyond what can be computed with, set to the limit.
    """

    of_tokens: list[Tensor]
    num_limited: int


def compute_advantages(
    trajectories: Sequence[Trajectory],
    masks: Sequence[Tensor],
    reference_logprobs: Sequence[Tensor],
    *,
    config: Config,
    kl_coefficient: float,
    stop_token_ids: frozenset[int],
) -> Advantages:
    """Advantages of a batch.

    Args:
        trajectories: of the whole batch.
        masks: of each [num_completion_tokens] bool, which of its tokens are in the loss.
        reference_logprobs: of each [num_completion_tokens] float; empty without a KL in the reward.
        config: `algorithm`, and the longest completion.
        kl_coefficient: what it is now, where a controller steers it.
        stop_token_ids: the tokens that end a completion.
    """
    algorithm = config.algorithm
    samples = _Samples(trajectories)
    rewards = samples.last(_shaped(trajectories, config, stop_token_ids))
    num_limited = int((rewards.abs() >= REWARD_LIMIT).sum())
    group_ids = torch.tensor([trajectory.group_id for trajectory in trajectories])
    in_loss = samples.total(torch.stack([mask.sum() for mask in masks]))
    penalties = [
        kl_coefficient * _divergence(trajectory, logprobs, algorithm.kl.estimator)
        for trajectory, logprobs in zip(trajectories, reference_logprobs, strict=bool(reference_logprobs))
    ]
    if algorithm.returns == "token":
        normed = _normalized(rewards, samples.last(group_ids), in_loss, algorithm.reward_norm)
        by_token = _token_rewards(trajectories, samples.spread(normed), penalties, scale=algorithm.rewards.scale)
        returns = token_returns(by_token, algorithm.discount)
        lengths = torch.tensor([len(mask) for mask in masks])
        each = _normalized(
            torch.cat(returns),
            group_ids.repeat_interleave(lengths),
            torch.cat(list(masks)).long(),
            algorithm.adv_norm,
        )
        return Advantages(list(each.float().split(lengths.tolist())), num_limited)
    if penalties:
        rewards = rewards - samples.total(torch.stack([penalty.sum() for penalty in penalties]))
    of_samples = samples.last(group_ids)
    normed = _normalized(rewards, of_samples, in_loss, algorithm.reward_norm)
    scalars = samples.spread(_normalized(normed, of_samples, in_loss, algorithm.adv_norm)).float()
    return Advantages([a.expand(len(mask)) for a, mask in zip(scalars, masks, strict=True)], num_limited)


def behaviour_logprobs(trajectory: Trajectory) -> Tensor:
    """[num_completion_tokens] float32; 0 where somebody else wrote the token."""
    return torch.tensor(trajectory.completion.behaviour_logprobs)


def policy_tokens(trajectory: Trajectory) -> Tensor:
    """[num_completion_tokens] bool, the policy wrote the token."""
    return torch.from_numpy(written_by_policy(trajectory.completion.spans, len(trajectory.completion.tokens)))


class _Samples:
    """Which trajectories are of one sample. A sample has one reward and one advantage, which all of them carry, so
    norms see each sample once, however many trajectories its episode gave."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        numbers: dict[SampleId, int] = {}
        self._number = torch.tensor([numbers.setdefault(t.sample_id, len(numbers)) for t in trajectories])
        self._last = torch.tensor(list({t.sample_id: index for index, t in enumerate(trajectories)}.values()))

    def last(self, values: Tensor) -> Tensor:
        """[num_trajectories] to [num_samples]: the value of each sample's last trajectory."""
        return values[self._last]

    def total(self, values: Tensor) -> Tensor:
        """[num_trajectories] to [num_samples]: sums."""
        return torch.zeros(len(self._last), dtype=values.dtype).index_add(0, self._number, values)

    def spread(self, values: Tensor) -> Tensor:
        """[num_samples] to [num_trajectories]."""
        return values[self._number]


def _divergence(trajectory: Trajectory, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """[num_completion_tokens] float64, 0 where somebody else wrote the token."""
    divergence = kl_estimate(behaviour_logprobs(trajectory).double(), reference_logprobs.double(), estimator)
    return torch.where(policy_tokens(trajectory), divergence, 0.0)


def _shaped(trajectories: Sequence[Trajectory], config: Config, stop_token_ids: frozenset[int]) -> Tensor:
    completions = [trajectory.completion for trajectory in trajectories]
    return shape_rewards(
        torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64),
        num_tokens=torch.tensor([len(completion.tokens) for completion in completions]),
        truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
        has_eos=torch.tensor([int(completion.tokens[-1]) in stop_token_ids for completion in completions]),
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        config=config.algorithm.rewards,
    )


def _token_rewards(
    trajectories: Sequence[Trajectory], rewards: Tensor, penalties: Sequence[Tensor], *, scale: float
) -> list[Tensor]:
    """Rewards of single tokens stand at them, what is left of the trajectory's at its last token, a KL at each: without
    the KL their sum is the trajectory's reward, shaped and normed."""
    by_token = []
    for index, trajectory in enumerate(trajectories):
        own = torch.zeros(len(trajectory.completion.tokens), dtype=torch.float64)
        if trajectory.token_rewards is not None:
            own += scale * torch.tensor(trajectory.token_rewards, dtype=torch.float64)
        own[-1] += rewards[index] - own.sum()
        if penalties:
            own -= penalties[index]
        by_token.append(own)
    return by_token


def _normalized(values: Tensor, group_ids: Tensor, num_tokens: Tensor, norm: NormConfig) -> Tensor:
    """[len(values)] float64."""
    return normalize(values.double(), group_ids, num_tokens, norm)
