"""From a task's rewards to what the norms see: shaped rewards of trajectories, and returns of tokens.

In: rewards as the task gave them, and how each completion ended. Out: rewards with penalties, bias, scale and clip:

    r' = clip((r - penalties + bias) scale)

    soft overlong penalty, of n tokens, L = max_new_tokens, c = overlong_tokens  (DAPO, arXiv:2503.14476, eq. 13):
        overlong_penalty min(1, max(0, (n - (L - c)) / c))

and, where every token has its own return, with a per-token reward r_t (a KL, and r' at the last token):

    G_t = sum_{s >= t} discount^(s - t) r_s
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_rloo.config import RewardsConfig

REWARD_LIMIT = 1e12  # of a shaped reward: its square summed over any batch is finite, and no reward means that much


def shape_rewards(
    rewards: Tensor,
    *,
    num_tokens: Tensor,
    truncated: Tensor,
    has_eos: Tensor,
    max_new_tokens: int,
    config: RewardsConfig,
) -> Tensor:
    """Penalties, bias, scale and clip, by the equation above.

    Args:
        rewards: [num_trajectories] float64, finite.
        num_tokens: [num_trajectories] int64, length of each completion.
        truncated: [num_trajectories] bool, the engine's word that it stopped at the token limit.
        has_eos: [num_trajectories] bool, the last token is one that ends a completion.
        max_new_tokens: L.
        config: the penalties and the rest.

    Returns:
        [num_trajectories] float64; at most `REWARD_LIMIT` in magnitude.
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
    """G_t of every token: what it and the tokens after it are given, each step later discounted once more.

    Args:
        rewards: of each trajectory [num_tokens] float64.
        discount: in (0, 1].

    Returns:
        Of each trajectory [num_tokens] float64.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(rewards), batch_first=True)
    returns = torch.empty_like(padded)
    after = torch.zeros_like(padded[:, 0])
    for t in reversed(range(padded.shape[1])):
        after = padded[:, t] + discount * after
        returns[:, t] = after
    return [row[: len(own)] for row, own in zip(returns, rewards, strict=True)]
