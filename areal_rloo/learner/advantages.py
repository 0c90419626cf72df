"""Choose the tokens of a batch that are in the loss, and compute an advantage for every token from the rewards.

    rewards ─► shaped ─► less their KL to the reference ─► reward_norm ─► adv_norm ─► spread over the tokens
    returns=token:    shaped ─► reward_norm ─► per-token rewards, less the KL ─► discounted returns ─► adv_norm

Norms see the whole batch. A sample counts once, however many trajectories it has (`Samples`): it has one reward and one
place in the norms and in the means of the loss, and it is truncated, or has no end, if this holds for a trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from areal_rloo.algorithm.diagnostics import describe_advantages
from areal_rloo.algorithm.kl import Estimator, kl_estimate
from areal_rloo.algorithm.loss import written_by_policy
from areal_rloo.algorithm.normalization import REWARD_LIMIT, normalize, shape_rewards, token_returns
from areal_rloo.algorithm.own_parts import OwnAdvantages
from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.config import AlgorithmConfig, Config
from areal_rloo.trajectory import SampleId, Trajectory


class Samples:
    """The trajectories of a batch, and maps between them and their samples.

    Attributes:
        trajectories: in any order.
        number: the sample of each trajectory, from 0, [num_trajectories] int64.
        truncated: [num_samples] bool, the engine stopped a trajectory of the sample at the token limit.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        numbers: dict[SampleId, int] = {}
        self.trajectories = trajectories
        self.number = torch.tensor([numbers.setdefault(t.sample_id, len(numbers)) for t in trajectories])
        self._last = torch.tensor(list({t.sample_id: index for index, t in enumerate(trajectories)}.values()))
        self.truncated = self.has_any(torch.tensor([t.completion.finish_reason == "length" for t in trajectories]))

    def __len__(self) -> int:
        return len(self._last)

    def last(self, values: Tensor) -> Tensor:
        """Map [num_trajectories] to [num_samples]: the value of each sample's last trajectory."""
        return values[self._last]

    def total(self, values: Tensor) -> Tensor:
        """Map [num_trajectories] to [num_samples]: sums."""
        return torch.zeros(len(self), dtype=values.dtype).index_add(0, self.number, values)

    def has_any(self, values: Tensor) -> Tensor:
        """Map [num_trajectories] bool to [num_samples] bool."""
        return self.total(values.long()) > 0

    def largest(self, values: Tensor) -> Tensor:
        """Map [num_trajectories] to [num_samples], of values that are not negative."""
        return torch.zeros(len(self), dtype=values.dtype).scatter_reduce(0, self.number, values, "amax")

    def spread(self, values: Tensor) -> Tensor:
        """Map [num_samples] to [num_trajectories]."""
        return values[self.number]


@dataclass(frozen=True, slots=True)
class Masks:
    """The loss masks of a batch."""

    of_tokens: list[Tensor]  # of each trajectory [num_completion_tokens] bool, True where the token is in the loss
    stale_tokens: list[int]  # of each trajectory, the number of the policy's tokens past the staleness bound
    num_in_loss: Tensor  # [num_trajectories] int64, the number of tokens in the loss
    num_truncated: int  # tokens masked because their sample is truncated
    staleness_tokens: Counter[int]  # tokens in the loss, by staleness in versions

    @property
    def num_tokens(self) -> int:
        return self.staleness_tokens.total()

    @property
    def num_stale(self) -> int:
        return sum(self.stale_tokens)


def loss_masks(samples: Samples, *, policy_version: int, config: AlgorithmConfig) -> Masks:
    """Mask every token that another party wrote, that is past the staleness bound, or whose sample is truncated."""
    completions = [trajectory.completion for trajectory in samples.trajectories]
    lengths = [len(completion.tokens) for completion in completions]
    versions = np.concatenate([completion.versions for completion in completions])
    written = np.concatenate([written_by_policy(c.spans, num) for c, num in zip(completions, lengths, strict=True)])
    fresh = within_bound(versions, policy_version=policy_version, max_staleness=config.max_staleness)
    firsts = np.cumsum([0, *lengths[:-1]])
    stale_tokens = np.add.reduceat(written & ~fresh, firsts, dtype=np.int64).tolist()
    mask, num_truncated = written & fresh, 0
    if config.rewards.mask_truncated:
        truncated = mask & np.repeat(samples.spread(samples.truncated).numpy(), lengths)
        mask, num_truncated = mask & ~truncated, int(truncated.sum())
    num_in_loss = torch.from_numpy(np.add.reduceat(mask, firsts, dtype=np.int64))
    staleness = policy_version - versions[mask]
    least = int(staleness.min(initial=0))
    counts = enumerate(np.bincount(staleness - least).tolist(), start=least)
    staleness_tokens = Counter({each: num for each, num in counts if num})  # in this order: a replay compares texts
    of_tokens = list(torch.from_numpy(mask).split(lengths))
    return Masks(of_tokens, stale_tokens, num_in_loss, num_truncated, staleness_tokens)


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a batch."""

    of_tokens: list[Tensor]  # of each trajectory [num_completion_tokens] float32
    any_of_tokens: list[bool]  # of each trajectory, True if a token has an advantage other than 0
    numbers: Mapping[str, float]  # by field of TrainRecord; over tokens in the loss, NaN if there are none


def compute_advantages(
    samples: Samples,
    masks: Masks,
    reference_logprobs: Sequence[Tensor],
    *,
    config: Config,
    kl_coefficient: float,
    stop_token_ids: frozenset[int],
    own_norm: OwnAdvantages | None = None,
) -> Advantages:
    """Compute the advantages of a whole batch; `own_norm` stands in place of `adv_norm`.

    `reference_logprobs` are, of each trajectory, [num_completion_tokens] float, and empty without a KL in the reward.
    """
    algorithm, trajectories = config.algorithm, samples.trajectories
    rewards = _shaped(samples, config, stop_token_ids)
    group_ids = torch.tensor([trajectory.group_id for trajectory in trajectories])
    of_samples = samples.last(group_ids)
    lengths = torch.tensor([len(trajectory.completion.tokens) for trajectory in trajectories])
    num_in_loss = samples.total(masks.num_in_loss)
    penalties = [
        kl_coefficient * _divergence(trajectory, logprobs, algorithm.kl.estimator)
        for trajectory, logprobs in zip(trajectories, reference_logprobs, strict=bool(reference_logprobs))
    ]
    priced = bool(penalties) and algorithm.returns == "trajectory"
    left = rewards - samples.total(torch.stack([each.sum() for each in penalties])) if priced else rewards
    normed = normalize(left, of_samples, num_in_loss, algorithm.reward_norm)
    if algorithm.returns == "trajectory":
        adv_norm = own_norm or partial(normalize, norm=algorithm.adv_norm)
        values = samples.spread(adv_norm(normed, of_samples, num_in_loss)).float()
        by_token, counts, any_of_tokens = values.repeat_interleave(lengths), masks.num_in_loss, values != 0
    else:
        own = _token_rewards(trajectories, samples.spread(normed), penalties, scale=algorithm.rewards.scale)
        returns = torch.cat(token_returns(own, algorithm.discount))
        counts = torch.cat(masks.of_tokens).long()
        by_token = normalize(returns, group_ids.repeat_interleave(lengths), counts, algorithm.adv_norm).float()
        firsts = (lengths.cumsum(0) - lengths).numpy()
        values, any_of_tokens = by_token, torch.from_numpy(np.logical_or.reduceat(by_token.numpy() != 0, firsts))
    numbers = {"num_limited_rewards": int((rewards.abs() >= REWARD_LIMIT).sum()), **describe_advantages(values, counts)}
    return Advantages(list(by_token.split(lengths.tolist())), any_of_tokens.tolist(), numbers)


def policy_tokens(trajectory: Trajectory) -> Tensor:
    """Give [num_completion_tokens] bool, True where the policy wrote the token."""
    return torch.from_numpy(written_by_policy(trajectory.completion.spans, len(trajectory.completion.tokens)))


def _divergence(trajectory: Trajectory, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Give [num_completion_tokens] float64, 0 where another party wrote the token."""
    behaviour = torch.tensor(trajectory.completion.behaviour_logprobs, dtype=torch.float64)
    divergence = kl_estimate(behaviour, reference_logprobs.double(), estimator)
    return torch.where(policy_tokens(trajectory), divergence, 0.0)


def _shaped(samples: Samples, config: Config, stop_token_ids: frozenset[int]) -> Tensor:
    """Give [num_samples] float64."""
    completions = [trajectory.completion for trajectory in samples.trajectories]
    open_ended = torch.tensor([int(completion.tokens[-1]) not in stop_token_ids for completion in completions])
    return shape_rewards(
        samples.last(torch.tensor([trajectory.reward for trajectory in samples.trajectories], dtype=torch.float64)),
        num_tokens=samples.largest(torch.tensor([len(completion.tokens) for completion in completions])),
        truncated=samples.truncated,
        has_eos=~samples.has_any(open_ended),
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        config=config.algorithm.rewards,
    )


def _token_rewards(
    trajectories: Sequence[Trajectory], rewards: Tensor, penalties: Sequence[Tensor], *, scale: float
) -> list[Tensor]:
    """Give each token its own reward less its KL; the last token gets the rest of the reward, shaped and normed."""
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
