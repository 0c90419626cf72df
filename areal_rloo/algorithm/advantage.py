"""From rewards to advantages: one scalar a trajectory, centred and scaled within its group or the batch.

In: rewards and group ids of a batch, of all ranks. Out: advantages, before they are spread over the tokens; or returns
and group ids of tokens in, and advantages of tokens out. Nothing is kept.

RLOO (arXiv:2402.14740) is `{mean_level: group, mean_leave1out: true, std_level: none}`:

    A_i = r_i - 1/(K-1) sum_{j != i} r_j = K/(K-1) (r_i - mean(r))
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_rloo.config import NormConfig

_VALUE_LIMIT = 1e18  # the squares of any batch of them have a finite sum, and it is finite as a float32


def normalize(values: Tensor, group_ids: Tensor, num_tokens: Tensor, norm: NormConfig) -> Tensor:
    """Centre and scale one scalar per trajectory.

    Groups are known by id, never by position, so ragged and interleaved groups are right. Where all values of a level
    are equal, centring by that level gives exactly 0, and the level is not scaled, for it has no deviation. Under
    leave-one-out a level of one value has no others: it gives 0. The standard deviation is that of the centred values
    within `std_level`. `over: tokens` counts a value once for each of its tokens in the loss (REINFORCE++,
    arXiv:2501.03262), so a trajectory without one has no say.

    Args:
        values: [num_trajectories], any float dtype; computed in float64, as at most 1e18 in magnitude.
        group_ids: [num_trajectories] int64.
        num_tokens: [num_trajectories] int64, tokens in the loss; read for `over: tokens` alone.
        norm: which mean to subtract and which standard deviation to divide by.

    Returns:
        [num_trajectories] float64.
    """
    values = values.double().clamp(-_VALUE_LIMIT, _VALUE_LIMIT)
    weights = num_tokens.double() if norm.over == "tokens" else torch.ones_like(values)
    centred = values
    if norm.mean_level != "none":
        level = _Level(_level_index(group_ids, norm.mean_level), weights)
        centred = _centred(values, level, norm.mean_leave1out)
    if norm.std_level != "none":
        level = _Level(_level_index(group_ids, norm.std_level), weights)
        centred = centred / _scale(centred, level, unbiased=norm.std_unbiased, eps=norm.eps)
    return centred


class _Level:
    """The values that a mean or a deviation is taken over: `index` numbers the levels, `weights` counts each value."""

    def __init__(self, index: Tensor, weights: Tensor) -> None:
        self.index = index
        self._weights = weights
        self._zeros = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=index.device)
        self.count = self.sum(torch.ones_like(weights))

    def sum(self, values: Tensor) -> Tensor:
        """[num_levels], weighted."""
        return self._zeros.scatter_add(0, self.index, values * self._weights)

    def mean(self, values: Tensor) -> Tensor:
        """[num_levels], weighted; 0 where nothing counts."""
        return self.sum(values) / torch.where(self.count > 0, self.count, torch.ones_like(self.count))

    def all_equal(self, values: Tensor) -> Tensor:
        """[num_levels] bool: no two values that count differ."""

        def extreme(reduce: str, of_nothing: float) -> Tensor:
            counted = torch.where(self._weights > 0, values, of_nothing)
            return torch.full_like(self._zeros, of_nothing).scatter_reduce(0, self.index, counted, reduce)

        return extreme("amin", torch.inf) >= extreme("amax", -torch.inf)


def _level_index(group_ids: Tensor, level: str) -> Tensor:
    """Number the levels 0, 1, ...: [num_trajectories] int64."""
    if level == "batch":
        return torch.zeros_like(group_ids)
    index: Tensor = torch.unique(group_ids, return_inverse=True)[1]
    return index


def _centred(values: Tensor, level: _Level, leave1out: bool) -> Tensor:
    centred = values - level.mean(values)[level.index]
    if leave1out:
        factor = torch.where(level.count > 1, level.count / (level.count - 1).clamp(min=1), 0.0)
        centred = centred * factor[level.index]
    # Rounding of the mean would leave about 1e-17 where every value is the same, and AdamW would still follow its sign.
    return torch.where(level.all_equal(values)[level.index], 0.0, centred)


def _scale(values: Tensor, level: _Level, *, unbiased: bool, eps: float) -> Tensor:
    squares = level.sum((values - level.mean(values)[level.index]) ** 2)
    variance = squares / (level.count - 1 if unbiased else level.count).clamp(min=1)
    scale = variance.sqrt() + eps
    return torch.where(level.all_equal(values) | (scale == 0), 1.0, scale)[level.index]
