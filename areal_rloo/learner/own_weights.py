"""The factors of `algorithm.sample_weights`: a batch in, a factor on the token weights of each trajectory out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_rloo.algorithm.own_parts import OwnWeights
from areal_rloo.learner.advantages import Masks, Samples


def own_factors(function: OwnWeights, samples: Samples, masks: Masks, policy_version: int) -> Tensor:
    """Call the user's function with the samples of a batch; gives [num_trajectories] float32.

    Raises:
        UserError: the function raised, or returned no factor for a sample.
    """
    trajectories = samples.trajectories
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    group_ids = torch.tensor([trajectory.group_id for trajectory in trajectories])
    stale = _stale(samples, masks.of_tokens, policy_version)
    num_tokens = samples.total(masks.num_in_loss)
    staleness = samples.total(stale) / num_tokens.clamp(min=1)
    factors = function(samples.last(rewards), samples.last(group_ids), num_tokens, staleness)
    return samples.spread(factors).float()


def _stale(samples: Samples, masks: Sequence[Tensor], policy_version: int) -> Tensor:
    """Sum the staleness of the tokens in the loss: [num_trajectories] float64."""
    sums = [
        float((policy_version - trajectory.completion.versions)[mask.numpy()].sum())
        for trajectory, mask in zip(samples.trajectories, masks, strict=True)
    ]
    return torch.tensor(sums, dtype=torch.float64)
