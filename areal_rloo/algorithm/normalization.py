"""Shape rewards, sum them to returns, and centre and scale them within a group or the batch.

Takes tensors of numbers and group ids of the whole batch, from all ranks; keeps no state. `learner/advantages.py`
applies these functions to trajectories and spreads the results over tokens.

Shaped rewards:

    r' = clip((r - penalties + bias) scale)

    soft overlong penalty, of n tokens, L = max_new_tokens, c = overlong_tokens  (DAPO, arXiv:2503.14476, eq. 13):
        overlong_penalty min(1, max(0, (n - (L - c)) / c))

Returns of tokens, with a per-token reward r_t (a KL penalty, and r' at the last token):

    G_t = sum_{s >= t} discount^(s - t) r_s

Normalization. RLOO (arXiv:2402.14740) is `{mean_level: group, mean_leave1out: true, std_level: none}`:

    A_i = r_i - 1/(K-1) sum_{j != i} r_j = K/(K-1) (r_i - mean(r))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_rloo.config import NormConfig, RewardsConfig

REWARD_LIMIT = 1e12  # of a shaped reward: the sum of squares over any batch is finite
_VALUE_LIMIT = 1e18  # the squares of any batch have a finite sum, also as float32


def shape_rewards(
    rewards: Tensor,
    *,
    num_tokens: Tensor,
    truncated: Tensor,
    has_eos: Tensor,
    max_new_tokens: int,
    config: RewardsConfig,
) -> Tensor:
    """Apply penalties, bias, scale and clip, by the first equation above, to finite rewards.

    All tensors are [num_samples]: rewards and result float64, the result at most `REWARD_LIMIT` in magnitude;
    num_tokens int64, lengths of completions; truncated bool, the engine stopped at the token limit; has_eos bool, the
    last token ends a completion. max_new_tokens is L.
    """
    penalties = config.truncated_penalty * truncated.double() + config.missing_eos_penalty * (~has_eos).double()
    if config.overlong_tokens > 0:
        over = (num_tokens - (max_new_tokens - config.overlong_tokens)).double() / config.overlong_tokens
        penalties = penalties + config.overlong_penalty * over.clamp(0, 1)
    shaped = (rewards.double() - penalties + config.bias) * config.scale
    if config.clip is not None:
        shaped = shaped.clamp(*config.clip)
    return shaped.nan_to_num().clamp(-REWARD_LIMIT, REWARD_LIMIT)


def token_returns(rewards: Sequence[Tensor], discount: float) -> list[Tensor]:
    """Compute G_t of every token, from the rewards of each trajectory; rewards and results are [num_tokens] float64."""
    padded = torch.nn.utils.rnn.pad_sequence(list(rewards), batch_first=True)
    returns = torch.empty_like(padded)
    after = torch.zeros_like(padded[:, 0])
    for t in reversed(range(padded.shape[1])):
        after = padded[:, t] + discount * after
        returns[:, t] = after
    return [row[: len(own)] for row, own in zip(returns, rewards, strict=True)]


def normalize(values: Tensor, group_ids: Tensor, num_tokens: Tensor, norm: NormConfig) -> Tensor:
    """Centre and scale one scalar per trajectory.

    Groups are identified by id, not by position, so ragged and interleaved groups are correct. If all values of a level
    are equal, centring by that level gives exactly 0 and the level is not scaled. A level of one value gives 0 under
    leave-one-out. The standard deviation is taken over the centred values within `std_level`. `over: tokens` counts a
    value once per token in the loss (REINFORCE++, arXiv:2501.03262); a trajectory without such tokens does not count.

    All tensors are [num_trajectories]: values of any float dtype, clamped to 1e18 in magnitude; group_ids int64;
    num_tokens int64, tokens in the loss; the result float64.
    """
    values = values.double().clamp(-_VALUE_LIMIT, _VALUE_LIMIT)
    weights = num_tokens.double() if norm.over == "tokens" else torch.ones_like(values)
    if norm.mean_level != "none":
        values = _centred(values, _Level(norm.mean_level, group_ids, weights), norm.mean_leave1out)
    if norm.std_level != "none":
        values = values / _scale(values, _Level(norm.std_level, group_ids, weights), norm)
    return values


class _Level:
    """Sets of values that share a mean or deviation: `index` numbers the sets, `weights` counts each value.

    The results of all methods are [num_levels].
    """

    def __init__(self, kind: str, group_ids: Tensor, weights: Tensor) -> None:
        ids = torch.zeros_like(group_ids) if kind == "batch" else group_ids
        self.index: Tensor = torch.unique(ids, return_inverse=True)[1]  # [num_trajectories] int64
        self._weights = weights
        self._zeros = weights.new_zeros(int(self.index.max()) + 1)
        self.count = self.sum(torch.ones_like(weights))

    def sum(self, values: Tensor) -> Tensor:
        """[num_levels], weighted."""
        return self._zeros.scatter_add(0, self.index, values * self._weights)

    def mean(self, values: Tensor) -> Tensor:
        """[num_levels], weighted; 0 if no value counts."""
        return self.sum(values) / torch.where(self.count > 0, self.count, torch.ones_like(self.count))

    def all_equal(self, values: Tensor) -> Tensor:
        """[num_levels] bool: all values that count are equal."""

        def largest(values: Tensor) -> Tensor:
            counted = torch.where(self._weights > 0, values, -torch.inf)
            return torch.full_like(self._zeros, -torch.inf).scatter_reduce(0, self.index, counted, "amax")

        return largest(values) <= -largest(-values)


def _centred(values: Tensor, level: _Level, leave1out: bool) -> Tensor:
    centred = values - level.mean(values)[level.index]
    if leave1out:
        factor = torch.where(level.count > 1, level.count / (level.count - 1).clamp(min=1), 0.0)
        centred = centred * factor[level.index]
    # Rounding of the mean leaves about 1e-17 when all values are equal, and AdamW would follow the sign of 1e-17.
    return torch.where(level.all_equal(values)[level.index], 0.0, centred)


def _scale(values: Tensor, level: _Level, norm: NormConfig) -> Tensor:
    squares = level.sum((values - level.mean(values)[level.index]) ** 2)
    variance = squares / (level.count - 1 if norm.std_unbiased else level.count).clamp(min=1)
    scale = variance.sqrt() + norm.eps
    return torch.where(level.all_equal(values) | (scale == 0), 1.0, scale)[level.index]
