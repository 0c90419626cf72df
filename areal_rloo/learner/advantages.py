"""From the trajectories of a batch to an advantage for every token of them.

    rewards ─► shaped ─► less their KL to the reference ─► reward_norm ─► adv_norm ─► spread over the tokens
    returns=token:    shaped ─► reward_norm ─► per-token rewards, less the KL ─► discounted returns ─► adv_norm

Norms see the whole batch, over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_rloo.algorithm.advantage import normalize
from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.rewards import REWARD_LIMIT, shape_rewards, token_returns
from areal_rloo.config import Config, NormConfig
from areal_rloo.learner.parallel import Ranks
from areal_rloo.trajectory import Trajectory


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
    ranks: Ranks,
) -> Advantages:
    """Advantages of this rank's part of a batch.

    Args:
        trajectories: of this rank.
        masks: of each [num_completion_tokens] bool, which of its tokens are in the loss.
        reference_logprobs: of each [num_completion_tokens] float; empty without a KL in the reward.
        config: `algorithm`, and the longest completion.
        kl_coefficient: what it is now, where a controller steers it.
        stop_token_ids: the tokens that end a completion.
        ranks: where the rest of the batch is.
    """
    algorithm = config.algorithm
    rewards = _shaped(trajectories, config, stop_token_ids)
    num_limited = int((rewards.abs() >= REWARD_LIMIT).sum())
    group_ids = torch.tensor([trajectory.group_id for trajectory in trajectories])
    in_loss = torch.stack([mask.sum() for mask in masks])
    penalties = [
        kl_coefficient * kl_estimate(behaviour_logprobs(trajectory).double(), logprobs.double(), algorithm.kl.estimator)
        for trajectory, logprobs in zip(trajectories, reference_logprobs, strict=bool(reference_logprobs))
    ]
    if algorithm.returns == "token":
        normed = _normalize_over(ranks, rewards, group_ids, in_loss, algorithm.reward_norm)
        returns = token_returns(_token_rewards(trajectories, normed, penalties), algorithm.discount)
        lengths = torch.tensor([len(mask) for mask in masks])
        each = _normalize_over(
            ranks,
            torch.cat(returns),
            group_ids.repeat_interleave(lengths),
            torch.cat(list(masks)).long(),
            algorithm.adv_norm,
        )
        return Advantages(list(each.float().split(lengths.tolist())), num_limited)
    if penalties:
        rewards = rewards - torch.stack([penalty.sum() for penalty in penalties])
    normed = _normalize_over(ranks, rewards, group_ids, in_loss, algorithm.reward_norm)
    scalars = _normalize_over(ranks, normed, group_ids, in_loss, algorithm.adv_norm).float()
    return Advantages([a.expand(len(mask)) for a, mask in zip(scalars, masks, strict=True)], num_limited)


def behaviour_logprobs(trajectory: Trajectory) -> Tensor:
    """[num_completion_tokens] float32."""
    return torch.tensor(trajectory.completion.behaviour_logprobs)


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


def _token_rewards(trajectories: Sequence[Trajectory], rewards: Tensor, penalties: Sequence[Tensor]) -> list[Tensor]:
    """The reward of a trajectory stands at its last token, a KL penalty at each."""
    by_token = []
    for index, trajectory in enumerate(trajectories):
        own = torch.zeros(len(trajectory.completion.tokens), dtype=torch.float64)
        if penalties:
            own -= penalties[index]
        own[-1] += rewards[index]
        by_token.append(own)
    return by_token


def _normalize_over(ranks: Ranks, values: Tensor, group_ids: Tensor, num_tokens: Tensor, norm: NormConfig) -> Tensor:
    """`normalize` over the batch of all ranks; gives this rank's part, [len(values)] float64."""
    together = torch.stack([values.double(), group_ids.double(), num_tokens.double()], dim=1)
    everything, own = ranks.gather(together)
    normed = normalize(everything[:, 0], everything[:, 1].long(), everything[:, 2].long(), norm)
    return normed[own]
