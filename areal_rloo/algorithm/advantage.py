"""From rewards to advantages: one scalar a trajectory, centred and scaled within its group or the batch.

In: rewards and group ids of a batch. Out: advantages, before they are spread over the tokens. Nothing is kept.

RLOO (arXiv:2402.14740) is `{mean_level: group, mean_leave1out: true, std_level: none}`:

    A_i = r_i - 1/(K-1) sum_{j != i} r_j = K/(K-1) (r_i - mean(r))
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_rloo.config import NormConfig


def normalize(values: Tensor, group_ids: Tensor, norm: NormConfig) -> Tensor:
    """Centre and scale one scalar per trajectory.

    Groups are known by id, never by position, so ragged and interleaved groups are right. Where all values of a level
    are equal, centring by that level gives exactly 0. Under leave-one-out a level of one value has no others: it gives
    0. The standard deviation is that of the centred values within `std_level`; a level of one value is not scaled.

    Args:
        values: [num_trajectories], any float dtype; computed in float64.
        group_ids: [num_trajectories] int64.
        norm: which mean to subtract and which standard deviation to divide by.

    Returns:
        [num_trajectories] float32.
    """
    values = values.double()
    centred = values
    if norm.mean_level != "none":
        centred = _centred(values, _level_index(group_ids, norm.mean_level), norm.mean_leave1out)
    if norm.std_level != "none":
        index = _level_index(group_ids, norm.std_level)
        centred = centred / _scale(centred, index, unbiased=norm.std_unbiased, eps=norm.eps)
    return centred.float()


def _level_index(group_ids: Tensor, level: str) -> Tensor:
    """Number the levels 0, 1, ...: [num_trajectories] int64."""
    if level == "batch":
        return torch.zeros_like(group_ids)
    index: Tensor = torch.unique(group_ids, return_inverse=True)[1]
    return index


def _centred(values: Tensor, index: Tensor, leave1out: bool) -> Tensor:
    count, mean = _count_and_mean(values, index)
    centred = values - mean[index]
    if leave1out:
        factor = torch.where(count > 1, count / (count - 1).clamp(min=1), torch.zeros_like(count))
        centred = centred * factor[index]
    # Rounding of the mean would leave about 1e-17 where every value is the same, and AdamW would still follow its sign.
    low = torch.full_like(mean, torch.inf).scatter_reduce(0, index, values, "amin")
    high = torch.full_like(mean, -torch.inf).scatter_reduce(0, index, values, "amax")
    return torch.where((low == high)[index], torch.zeros_like(centred), centred)


def _scale(values: Tensor, index: Tensor, *, unbiased: bool, eps: float) -> Tensor:
    count, mean = _count_and_mean(values, index)
    squares = torch.zeros_like(mean).scatter_add(0, index, (values - mean[index]) ** 2)
    variance = squares / (count - 1 if unbiased else count).clamp(min=1)
    scale = variance.sqrt() + eps
    return torch.where(count > 1, scale, torch.ones_like(scale))[index]


def _count_and_mean(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Per level: how many values, and their mean; both float64."""
    num_levels = int(index.max()) + 1
    zeros = torch.zeros(num_levels, dtype=torch.float64, device=values.device)
    count = zeros.scatter_add(0, index, torch.ones_like(values))
    return count, zeros.scatter_add(0, index, values) / count
