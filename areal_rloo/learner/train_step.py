"""One train step: a batch of groups in, new weights in the model and numbers for the metrics out.

    stale tokens masked ─► reference logprobs ─► advantages ─► minibatches, in rows for every rank
            ─► proximal logprobs ─► for each minibatch: rows forward and backward, clip, AdamW

All that is said of a batch is computed here, on rank 0, from the whole of it; what needs the policy, the ranks compute
(`LearnerRank`), this one among them. A minibatch whose gradient is not finite is not stepped on, and the step says so.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from areal_rloo.algorithm.diagnostics import PolicyDiagnostics, diagnose
from areal_rloo.algorithm.kl import Estimator, adapted_coefficient, kl_estimate
from areal_rloo.algorithm.loss import TokenOutcomes, token_weights
from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.algorithm.turns import written_by_policy
from areal_rloo.config import Config
from areal_rloo.learner.advantages import behaviour_logprobs, compute_advantages, policy_tokens
from areal_rloo.learner.commands import RefreshReference, Score, Scores, Times, Train, Trained
from areal_rloo.learner.flops import train_flops
from areal_rloo.learner.packing import PackedBatch, pack
from areal_rloo.learner.team import Team
from areal_rloo.trajectory import Group, Trajectory


@dataclass(slots=True)
class StepResult:
    """What a train step did.

    Advantages are over tokens in the loss; `policy` over those of trajectories with a gradient. A KL to the reference
    is the behaviour policy's, mean over all completion tokens, in nats; NaN without a reference.
    """

    num_optimizer_steps: int = 0
    num_skipped: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    num_tokens: int = 0
    num_stale_tokens: int = 0
    num_truncated_tokens: int = 0
    staleness_tokens: Counter[int] = field(default_factory=Counter)
    kl_coefficient: float = 0.0
    reference_kl_k1: float = math.nan
    reference_kl_k3: float = math.nan
    reference_divergence: float = math.nan  # by the configured estimator
    advantage_mean: float = math.nan
    advantage_std: float = math.nan
    advantage_min: float = math.nan
    advantage_max: float = math.nan
    advantage_abs_mean: float = math.nan
    num_limited_rewards: int = 0
    masks: list[Tensor] = field(default_factory=list)  # of each trajectory, tokens in the loss
    advantages: list[Tensor] = field(default_factory=list)  # of each trajectory, by token
    stale_tokens: list[int] = field(default_factory=list)  # of each trajectory, how many are past the bound
    policy: PolicyDiagnostics = field(default_factory=PolicyDiagnostics)
    times: Times = field(default_factory=dict)  # by part, of the slowest rank
    num_computed_tokens: int = 0  # that went forward and backward, prompts among them
    flops: float = 0.0
    model_flops_share: float = math.nan  # of what the ranks' devices could do; NaN where that is not known
    train_step_s: float = 0.0


class TrainStep:
    """What a batch means for the policy. One per learner, on rank 0."""

    def __init__(self, team: Team, config: Config, *, stop_token_ids: Sequence[int] = ()) -> None:
        """
        Args:
            team: the ranks that have the policy, and the reference policy where `algorithm.kl.coefficient` is above 0.
            config: `algorithm` and `learner`.
            stop_token_ids: the tokens that end a completion; read for a penalty on a missing one.
        """
        kl = config.algorithm.kl
        assert team.has_reference == (kl.coefficient > 0), "a reference model if and only if there is a KL term"
        self.team = team
        self.kl_coefficient = kl.coefficient
        self._config = config
        self._stop_token_ids = frozenset(stop_token_ids)
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"

    def step(self, groups: Sequence[Group], *, policy_version: int) -> StepResult:
        """Train once on a batch at this version."""
        started_s = time.perf_counter()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        result = StepResult(learning_rate=self.team.learning_rate, kl_coefficient=self.kl_coefficient)
        masks = self._masks(trajectories, policy_version, result)
        reference = self._reference_logprobs(trajectories, policy_version, result)
        advantages = self._advantages(trajectories, masks, reference, result)
        result.masks, result.advantages = masks, advantages
        minibatches = self._minibatches(trajectories, advantages, masks, reference, policy_version)
        self._optimize(minibatches, result)
        self._adapt(len(trajectories), result)
        result.train_step_s = time.perf_counter() - started_s
        able = self.team.num_ranks * self.team.own.peak_flops * result.train_step_s
        result.model_flops_share = result.flops / able
        return result

    def _masks(self, trajectories: Sequence[Trajectory], policy_version: int, result: StepResult) -> list[Tensor]:
        """Which completion tokens are in the loss: the policy's own, within the staleness bound, and of no truncated
        trajectory where those are masked. Counts the last two, and what is left by staleness."""
        algorithm = self._config.algorithm
        masks = []
        for trajectory in trajectories:
            versions = trajectory.completion.versions
            written = written_by_policy(trajectory.completion.spans, len(versions))
            fresh = within_bound(versions, policy_version=policy_version, max_staleness=algorithm.max_staleness)
            result.stale_tokens.append(int((written & ~fresh).sum()))
            result.num_stale_tokens += result.stale_tokens[-1]
            mask = written & fresh
            if algorithm.rewards.mask_truncated and trajectory.completion.finish_reason == "length":
                result.num_truncated_tokens += int(mask.sum())
                mask = np.zeros_like(mask)
            values, counts = np.unique(policy_version - versions[mask], return_counts=True)
            result.staleness_tokens.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
            result.num_tokens += int(mask.sum())
            masks.append(torch.from_numpy(mask))
        return masks

    def _reference_logprobs(
        self, trajectories: Sequence[Trajectory], policy_version: int, result: StepResult
    ) -> list[Tensor]:
        """Of each trajectory's completion tokens, in CPU memory; empty without a reference model."""
        if not self.team.has_reference:
            return []
        started_s = time.perf_counter()
        settings = self._config.model.reference
        assert settings is not None, "a reference model comes from its section"
        every = settings.refresh_every_n_versions
        if every is not None and policy_version > 0 and policy_version % every == 0:
            self.team.tell([RefreshReference()] * self.team.num_ranks)
        packed = self._packed(trajectories)
        answers = self.team.tell([Score(microbatches) for microbatches in packed.microbatches])
        rows = [answer.logprobs for answer in answers if isinstance(answer, Scores)]
        by_trajectory = packed.unpacked(rows, len(trajectories))
        written = torch.cat([policy_tokens(trajectory) for trajectory in trajectories])
        behaviour = torch.cat([behaviour_logprobs(trajectory) for trajectory in trajectories]).double()[written]
        everything = torch.cat(by_trajectory).double()[written]
        estimators: tuple[Estimator, ...] = ("k1", "k3", self._config.algorithm.kl.estimator)
        result.reference_kl_k1, result.reference_kl_k3, result.reference_divergence = (
            float(kl_estimate(behaviour, everything, estimator).mean()) for estimator in estimators
        )
        result.times["reference"] = time.perf_counter() - started_s
        return by_trajectory

    def _advantages(
        self,
        trajectories: Sequence[Trajectory],
        masks: Sequence[Tensor],
        reference: Sequence[Tensor],
        result: StepResult,
    ) -> list[Tensor]:
        """Of each trajectory [num_completion_tokens] float32."""
        advantages = compute_advantages(
            trajectories,
            masks,
            () if self._kl_in_loss else reference,
            config=self._config,
            kl_coefficient=self.kl_coefficient,
            stop_token_ids=self._stop_token_ids,
        )
        result.num_limited_rewards = advantages.num_limited
        in_loss = torch.cat(advantages.of_tokens)[torch.cat(list(masks))].double()
        if len(in_loss) > 0:
            result.advantage_mean, result.advantage_abs_mean = float(in_loss.mean()), float(in_loss.abs().mean())
            result.advantage_std = float(in_loss.std(correction=0))
            result.advantage_min, result.advantage_max = float(in_loss.min()), float(in_loss.max())
        return advantages.of_tokens

    def _minibatches(
        self,
        trajectories: list[Trajectory],
        advantages: Sequence[Tensor],
        masks: Sequence[Tensor],
        reference: Sequence[Tensor],
        policy_version: int,
    ) -> list[PackedBatch]:
        """Deal what has a gradient out to minibatches, in an order drawn from the run's seed and the version."""
        num = min(self._config.learner.num_minibatches, len(trajectories))
        order = np.random.default_rng([self._config.run.seed, policy_version]).permutation(len(trajectories))
        everything_has_one = self._kl_in_loss or self._config.algorithm.loss.entropy_coefficient != 0
        minibatches = []
        for share in np.array_split(order, num):
            indices = sorted(share.tolist())
            weights = self._token_weights([masks[i] for i in indices])
            by_index = dict(zip(indices, weights, strict=True))
            # A trajectory without an advantage has no gradient, unless a KL or an entropy is in the loss, so it costs
            # no forward pass; its tokens stand in the denominator all the same. One is always kept for the metrics.
            live = [i for i in indices if everything_has_one or bool(advantages[i].any())] or indices[:1]
            kept = [trajectories[i] for i in live]
            columns = {
                "behaviour": [behaviour_logprobs(trajectory) for trajectory in kept],
                "advantages": [advantages[i] for i in live],
                "weights": [by_index[i] for i in live],
                "staleness": [policy_version - torch.from_numpy(t.completion.versions).long() for t in kept],
            }
            if self._kl_in_loss:
                columns["reference"] = [reference[i] for i in live]
            minibatches.append(self._packed(kept, columns))
        return minibatches

    def _packed(
        self, trajectories: Sequence[Trajectory], columns: Mapping[str, Sequence[Tensor]] | None = None
    ) -> PackedBatch:
        return pack(
            trajectories,
            max_tokens=self._config.learner.microbatch_tokens,
            num_ranks=self.team.num_ranks,
            columns=columns,
        )

    def _token_weights(self, masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The share of each token of a minibatch in its mean, by trajectory."""
        lengths = torch.tensor([len(mask) for mask in masks])
        weights = token_weights(
            torch.cat(list(masks)),
            torch.repeat_interleave(torch.arange(len(masks)), lengths),
            num_sequences=len(masks),
            max_new_tokens=self._config.rollout.sampling.max_new_tokens,
            config=self._config.algorithm.loss,
        )
        parts: tuple[Tensor, ...] = weights.split(lengths.tolist())
        return parts

    def _optimize(self, minibatches: Sequence[PackedBatch], result: StepResult) -> None:
        """Let every rank train on its rows, and put together what they say of it."""
        for minibatch in minibatches:
            lengths, num_targets = minibatch.sizes()
            result.num_computed_tokens += sum(lengths)
            result.flops += train_flops(
                self.team.own.policy.causal.config, lengths, num_targets, frozen=self._config.learner.lora is not None
            )
        commands = [
            Train([minibatch.microbatches[rank] for minibatch in minibatches], self.kl_coefficient)
            for rank in range(self.team.num_ranks)
        ]
        started_s = time.perf_counter()
        trained = [answer for answer in self.team.tell(commands) if isinstance(answer, Trained)]
        every_s = time.perf_counter() - started_s
        first = trained[0]
        result.num_optimizer_steps, result.num_skipped = sum(first.stepped), first.stepped.count(False)
        result.gradient_norm = float(np.max(first.gradient_norms))  # unlike max, NaN stays
        result.loss = sum(sum(answer.losses) for answer in trained) / len(minibatches)
        result.policy = diagnose(
            [[TokenOutcomes(**answer.outcomes[index]) for answer in trained] for index in range(len(minibatches))]
        )
        parts = {part: max(answer.times[part] for answer in trained) for part in first.times}
        result.times |= parts | {"exchange": max(0.0, every_s - sum(parts.values()))}

    def _adapt(self, num_trajectories: int, result: StepResult) -> None:
        """Steer the KL coefficient, where a controller is asked for, after a step that was taken."""
        adaptive = self._config.algorithm.kl.adaptive
        if adaptive is None or result.num_optimizer_steps == 0:
            return
        self.kl_coefficient = adapted_coefficient(
            self.kl_coefficient,
            divergence=result.reference_divergence,
            num_trajectories=num_trajectories,
            config=adaptive,
        )
