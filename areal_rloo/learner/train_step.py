"""One train step: a batch of groups in, new weights in the model and numbers for the metrics out.

    rewards (less their KL to the reference) ─► reward_norm ─► adv_norm ─► spread over tokens ─► stale tokens masked
            ─► proximal logprobs ─► for each minibatch: rows forward and backward, clip, AdamW

Waits for nobody. A minibatch whose gradient is not finite is not stepped on, and the step says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.algorithm.advantage import normalize
from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.loss import LossOutput, policy_loss, token_weights
from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.config import Config
from areal_rloo.learner.optimizer import make_optimizer
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.logprobs import packed_logprobs
from areal_rloo.trajectory import Group, Trajectory


@dataclass(slots=True)
class StepResult:
    """What a train step did.

    Token counts are over all completion tokens within the bound; ratio, behaviour_weight and entropy over those of
    trajectories with an advantage other than 0, the only ones with a gradient.
    """

    num_optimizer_steps: int = 0
    num_skipped: int = 0
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    num_tokens: int = 0
    num_masked_tokens: int = 0
    entropy: float = 0.0
    ratio_mean: float = 0.0
    ratio_max: float = 0.0
    ratio_clipped_share: float = 0.0
    ratio_limited_share: float = 0.0
    behaviour_weight_mean: float = 0.0
    behaviour_weight_max: float = 0.0
    behaviour_weight_limited_share: float = 0.0
    reference_kl_k1: float = 0.0
    reference_kl_k3: float = 0.0
    advantage_abs_mean: float = 0.0
    zero_variance_group_share: float = 0.0
    staleness_tokens: Counter[int] = field(default_factory=Counter)
    train_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """The tensors of one minibatch; lists run over its trajectories, arrays over their completion tokens."""

    trajectories: list[Trajectory]
    advantages: list[float]
    weights: list[Tensor]
    reference: list[Tensor]  # empty without a KL term in the loss
    rows: list[Row]


class TrainStep:
    """The model, its optimizer, and the step. One per learner."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        *,
        device: torch.device,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """`reference` is the frozen policy of the KL term; None where `algorithm.kl.coefficient` is 0."""
        kl = config.algorithm.kl
        assert (reference is None) == (kl.coefficient == 0), "a reference model if and only if there is a KL term"
        self.model = model
        self._reference = reference
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"
        self._config = config
        self._device = device
        self._dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        learner = config.learner
        self.optimizer, self.schedule = make_optimizer(
            model.parameters(),
            learner.optimizer,
            num_optimizer_steps=learner.num_train_steps * learner.num_minibatches,
        )

    def step(self, groups: Sequence[Group], *, policy_version: int) -> StepResult:
        """Train once on a batch at this version."""
        started_s = time.perf_counter()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        result = StepResult(
            zero_variance_group_share=_zero_variance_share(groups),
            learning_rate=float(self.schedule.get_last_lr()[0]),
        )
        masks = self._masks(trajectories, policy_version, result)
        reference = self._reference_logprobs(trajectories, result)
        advantages = self._advantages(trajectories, torch.tensor([int(mask.sum()) for mask in masks]), reference)
        result.advantage_abs_mean = float(advantages.abs().mean())
        minibatches = self._minibatches(trajectories, advantages, masks, reference, policy_version)
        # The first minibatch starts from the proximal weights themselves, so its current logprobs are proximal.
        proximal = [None, *(self._logprobs_without_gradient(minibatch) for minibatch in minibatches[1:])]
        totals: list[LossOutput] = []
        for minibatch, proximal_logprobs in zip(minibatches, proximal, strict=True):
            totals += self._optimize(minibatch, proximal_logprobs, result)
        _summarize(totals, result, num_minibatches=len(minibatches))
        result.train_step_s = time.perf_counter() - started_s
        return result

    def _advantages(
        self, trajectories: Sequence[Trajectory], num_tokens: Tensor, reference: Sequence[Tensor]
    ) -> Tensor:
        """One float32 scalar a trajectory, in order; `num_tokens` of each are in the loss."""
        kl = self._config.algorithm.kl
        rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
        if kl.coefficient > 0 and kl.placement == "reward":
            penalties = [
                kl_estimate(_behaviour(trajectory).double(), logprobs.double(), kl.estimator).sum()
                for trajectory, logprobs in zip(trajectories, reference, strict=True)
            ]
            rewards = rewards - kl.coefficient * torch.stack(penalties)
        group_ids = torch.tensor([trajectory.group_id for trajectory in trajectories])
        normed = normalize(rewards, group_ids, num_tokens, self._config.algorithm.reward_norm)
        return normalize(normed, group_ids, num_tokens, self._config.algorithm.adv_norm).float()

    def _reference_logprobs(self, trajectories: Sequence[Trajectory], result: StepResult) -> list[Tensor]:
        """Of each trajectory's completion tokens, on the CPU; empty without a reference model."""
        if self._reference is None:
            return []
        by_trajectory: list[Tensor] = [torch.empty(0)] * len(trajectories)
        for row in pack(trajectories, max_tokens=self._config.learner.microbatch_tokens, device=self._device):
            with torch.no_grad():
                logprobs = self._logprobs(row, self._reference).cpu()
            lengths = [len(trajectories[i].completion.tokens) for i in row.trajectory_index]
            for index, part in zip(row.trajectory_index, logprobs.split(lengths), strict=True):
                by_trajectory[index] = part
        behaviour = torch.cat([_behaviour(trajectory) for trajectory in trajectories])
        everything = torch.cat(by_trajectory)
        result.reference_kl_k1 = float(kl_estimate(behaviour, everything, "k1").mean())
        result.reference_kl_k3 = float(kl_estimate(behaviour, everything, "k3").mean())
        return by_trajectory

    def _masks(
        self, trajectories: Sequence[Trajectory], policy_version: int, result: StepResult
    ) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Which completion tokens are within the staleness bound; counts them by staleness."""
        masks = []
        for trajectory in trajectories:
            versions = trajectory.completion.versions
            mask = within_bound(
                versions, policy_version=policy_version, max_staleness=self._config.algorithm.max_staleness
            )
            values, counts = np.unique(policy_version - versions[mask], return_counts=True)
            result.staleness_tokens.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
            result.num_tokens += int(mask.sum())
            result.num_masked_tokens += int((~mask).sum())
            masks.append(mask)
        return masks

    def _minibatches(
        self,
        trajectories: list[Trajectory],
        advantages: Tensor,
        masks: Sequence[np.ndarray[tuple[int], np.dtype[np.bool_]]],
        reference: Sequence[Tensor],
        policy_version: int,
    ) -> list[_Minibatch]:
        """Deal what has a gradient out to minibatches, in an order drawn from the run's seed and the version."""
        num = min(self._config.learner.num_minibatches, len(trajectories))
        order = np.random.default_rng([self._config.run.seed, policy_version]).permutation(len(trajectories))
        minibatches = []
        for share in np.array_split(order, num):
            indices = sorted(share.tolist())
            mask = torch.from_numpy(np.concatenate([masks[i] for i in indices]))
            lengths = torch.tensor([len(masks[i]) for i in indices])
            weights = token_weights(
                mask,
                torch.repeat_interleave(torch.arange(len(indices)), lengths),
                num_sequences=len(indices),
                max_new_tokens=self._config.rollout.sampling.max_new_tokens,
                config=self._config.algorithm.loss,
            )
            by_index = dict(zip(indices, weights.split(lengths.tolist()), strict=True))
            # Without a KL term in the loss a trajectory with advantage 0 has no gradient, so it costs no forward pass;
            # its tokens stand in the denominator all the same. Where none is left, one is kept for the metrics.
            live = [i for i in indices if self._kl_in_loss or advantages[i] != 0] or indices[:1]
            kept = [trajectories[i] for i in live]
            minibatches.append(
                _Minibatch(
                    trajectories=kept,
                    advantages=[float(advantages[i]) for i in live],
                    weights=[by_index[i] for i in live],
                    reference=[reference[i] for i in live] if self._kl_in_loss else [],
                    rows=pack(kept, max_tokens=self._config.learner.microbatch_tokens, device=self._device),
                )
            )
        return minibatches

    def _logprobs(self, row: Row, model: PreTrainedModel) -> Tensor:
        return packed_logprobs(
            model,
            input_ids=row.input_ids,
            layout=row.layout,
            predicts=row.predicts,
            targets=row.targets,
            temperature=self._config.rollout.sampling.temperature,
            dtype=self._dtype,
        )

    @torch.no_grad()
    def _logprobs_without_gradient(self, minibatch: _Minibatch) -> list[Tensor]:
        return [self._logprobs(row, self.model) for row in minibatch.rows]

    def _optimize(self, minibatch: _Minibatch, proximal: list[Tensor] | None, result: StepResult) -> list[LossOutput]:
        """Gradients of all rows, then one optimizer step, unless something is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        outputs = []
        for index, row in enumerate(minibatch.rows):
            current = self._logprobs(row, self.model)
            output = self._loss(minibatch, row, current, current.detach() if proximal is None else proximal[index])
            output.loss.backward()
            outputs.append(output)
        max_norm = self._config.learner.optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        result.gradient_norm = max(result.gradient_norm, norm.item())
        if bool(torch.isfinite(norm)) and all(bool(torch.isfinite(output.loss)) for output in outputs):
            self.optimizer.step()
            self.schedule.step()
            result.num_optimizer_steps += 1
        else:
            result.num_skipped += 1
        return outputs

    def _loss(self, minibatch: _Minibatch, row: Row, current: Tensor, proximal: Tensor) -> LossOutput:
        chosen = [minibatch.trajectories[i] for i in row.trajectory_index]
        weights = torch.cat([minibatch.weights[i] for i in row.trajectory_index]).to(self._device)
        advantages = np.concatenate(
            [
                np.full(len(trajectory.completion.tokens), minibatch.advantages[i], np.float32)
                for i, trajectory in zip(row.trajectory_index, chosen, strict=True)
            ]
        )
        output = policy_loss(
            behaviour_logprobs=torch.cat([_behaviour(trajectory) for trajectory in chosen]).to(self._device),
            proximal_logprobs=proximal,
            current_logprobs=current,
            advantages=torch.from_numpy(advantages).to(self._device),
            token_weights=weights,
            sequence_index=row.sequence_index,
            config=self._config.algorithm.loss,
        )
        if not self._kl_in_loss:
            return output
        kl = self._config.algorithm.kl
        reference = torch.cat([minibatch.reference[i] for i in row.trajectory_index]).to(self._device)
        divergence = torch.where(weights != 0, kl_estimate(current, reference, kl.estimator), 0.0)
        return replace(output, loss=output.loss + kl.coefficient * (weights * divergence).sum())


def _behaviour(trajectory: Trajectory) -> Tensor:
    return torch.tensor(trajectory.completion.behaviour_logprobs)


def _zero_variance_share(groups: Sequence[Group]) -> float:
    equal = [len({trajectory.reward for trajectory in group.trajectories}) == 1 for group in groups]
    return sum(equal) / len(equal)


def _summarize(outputs: Sequence[LossOutput], result: StepResult, *, num_minibatches: int) -> None:
    num_tokens = max(1.0, sum(float(output.num_tokens) for output in outputs))
    result.loss = sum(output.loss.item() for output in outputs) / num_minibatches
    result.entropy = sum(float(output.negative_logprob_sum) for output in outputs) / num_tokens
    result.ratio_mean = sum(float(output.ratio_sum) for output in outputs) / num_tokens
    result.ratio_max = max(float(output.ratio_max) for output in outputs)
    result.ratio_clipped_share = sum(float(output.ratio_clipped) for output in outputs) / num_tokens
    result.ratio_limited_share = sum(float(output.ratio_limited) for output in outputs) / num_tokens
    result.behaviour_weight_mean = sum(float(output.behaviour_weight_sum) for output in outputs) / num_tokens
    result.behaviour_weight_max = max(float(output.behaviour_weight_max) for output in outputs)
    result.behaviour_weight_limited_share = sum(float(o.behaviour_weight_limited) for o in outputs) / num_tokens
