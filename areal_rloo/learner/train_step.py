"""One train step: a batch of groups in, new weights in the model and numbers for the metrics out.

    reference logprobs ─► advantages ─► stale tokens masked ─► proximal logprobs
            ─► for each minibatch: rows forward and backward, clip, AdamW

Waits for nobody but the learner's other ranks. A minibatch whose gradient is not finite is not stepped on, and the step
says so.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.algorithm.behaviour import interpolated_proximal
from areal_rloo.algorithm.diagnostics import PolicyDiagnostics, diagnose
from areal_rloo.algorithm.kl import Estimator, adapted_coefficient, kl_estimate
from areal_rloo.algorithm.loss import LossOutput, mask_counts, policy_loss, token_weights
from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.algorithm.turns import written_by_policy
from areal_rloo.config import Config
from areal_rloo.learner.advantages import behaviour_logprobs, compute_advantages, policy_tokens
from areal_rloo.learner.optimizer import make_optimizer
from areal_rloo.learner.packing import Row, pack
from areal_rloo.learner.parallel import Ranks
from areal_rloo.models.logprobs import Entropy, TokenLogprobs
from areal_rloo.models.packed import packed_logprobs, packed_loss
from areal_rloo.models.reference import Reference
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
    train_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """One minibatch; lists run over its trajectories, the tensors in them over their completion tokens."""

    behaviour: list[Tensor]
    advantages: list[Tensor]
    weights: list[Tensor]
    reference: list[Tensor]  # empty without a KL term in the loss
    staleness: list[Tensor]
    rows: list[Row]


class TrainStep:
    """The model, its optimizer, and the step. One per learner rank."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        *,
        device: torch.device,
        reference: Reference | None = None,
        stop_token_ids: Sequence[int] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            model: the policy, on `device`.
            config: `algorithm` and `learner`.
            device: where to compute.
            reference: the frozen policy of the KL term; None where `algorithm.kl.coefficient` is 0.
            stop_token_ids: the tokens that end a completion; read for a penalty on a missing one.
            ranks: the learner's ranks; None for the only one.
        """
        kl = config.algorithm.kl
        assert (reference is None) == (kl.coefficient == 0), "a reference model if and only if there is a KL term"
        self.model = model
        self.reference = reference
        self.kl_coefficient = kl.coefficient
        self._config = config
        self._device = device
        self._dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self._stop_token_ids = frozenset(stop_token_ids)
        self._ranks = ranks or Ranks()
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"
        learner = config.learner
        self.optimizer, self.schedule = make_optimizer(
            model.parameters(),
            learner.optimizer,
            num_optimizer_steps=learner.num_train_steps * learner.num_minibatches,
        )

    @property
    def refreshed_reference(self) -> PreTrainedModel | None:
        """The reference's weights, where they change during the run and a checkpoint has to hold them."""
        settings = self._config.model.reference
        if self.reference is None or settings is None or settings.refresh_every_n_versions is None:
            return None
        return self.reference.model

    def step(self, groups: Sequence[Group], *, policy_version: int) -> StepResult:
        """Train once on a batch at this version."""
        started_s = time.perf_counter()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        result = StepResult(learning_rate=float(self.schedule.get_last_lr()[0]), kl_coefficient=self.kl_coefficient)
        masks = self._masks(trajectories, policy_version, result)
        reference = self._reference_logprobs(trajectories, policy_version, result)
        advantages = self._advantages(trajectories, masks, reference, result)
        result.masks, result.advantages = masks, advantages
        minibatches = self._minibatches(trajectories, advantages, masks, reference, policy_version)
        proximal = self._proximal(minibatches)
        outputs = [
            self._optimize(minibatch, logprobs, result)
            for minibatch, logprobs in zip(minibatches, proximal, strict=True)
        ]
        result.loss = sum(output.loss.item() for rows in outputs for output in rows) / len(minibatches)
        result.policy = diagnose([[output.tokens for output in rows] for rows in outputs])
        self._adapt(int(self._ranks.total(torch.tensor(len(trajectories)))), result)
        result.train_step_s = time.perf_counter() - started_s
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
        if self.reference is None:
            return []
        settings = self._config.model.reference
        assert settings is not None, "a reference model comes from its section"
        every = settings.refresh_every_n_versions
        if every is not None and policy_version > 0 and policy_version % every == 0:
            self.reference.refresh(self.model)
        by_trajectory: list[Tensor] = [torch.empty(0)] * len(trajectories)
        with self.reference.loaded() as model, torch.no_grad():
            for row in pack(trajectories, max_tokens=self._config.learner.microbatch_tokens, device=self._device):
                logprobs = self._logprobs(row, model).logprobs.cpu()
                lengths = [len(trajectories[i].completion.tokens) for i in row.trajectory_index]
                for index, part in zip(row.trajectory_index, logprobs.split(lengths), strict=True):
                    by_trajectory[index] = part
        written = torch.cat([policy_tokens(trajectory) for trajectory in trajectories])
        behaviour = torch.cat([behaviour_logprobs(trajectory) for trajectory in trajectories]).double()[written]
        everything = torch.cat(by_trajectory).double()[written]
        estimators: tuple[Estimator, ...] = ("k1", "k3", self._config.algorithm.kl.estimator)
        sums = [kl_estimate(behaviour, everything, estimator).sum() for estimator in estimators]
        *totals, count = self._ranks.total(torch.stack([*sums, torch.tensor(float(len(behaviour)))])).tolist()
        result.reference_kl_k1, result.reference_kl_k3, result.reference_divergence = (t / count for t in totals)
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
            ranks=self._ranks,
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
    ) -> list[_Minibatch]:
        """Deal what has a gradient out to minibatches, in an order drawn from the run's seed and the version."""
        smallest = int(self._ranks.gather(torch.tensor([len(trajectories)]))[0].min())
        num = min(self._config.learner.num_minibatches, smallest)
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
            minibatches.append(
                _Minibatch(
                    behaviour=[behaviour_logprobs(trajectory) for trajectory in kept],
                    advantages=[advantages[i] for i in live],
                    weights=[by_index[i] for i in live],
                    reference=[reference[i] for i in live] if self._kl_in_loss else [],
                    staleness=[policy_version - torch.from_numpy(t.completion.versions).long() for t in kept],
                    rows=pack(kept, max_tokens=self._config.learner.microbatch_tokens, device=self._device),
                )
            )
        return minibatches

    def _token_weights(self, masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The share of each token of a minibatch in its mean, by trajectory; the denominator is that of all ranks."""
        lengths = torch.tensor([len(mask) for mask in masks])
        mask, sequence_index = torch.cat(list(masks)), torch.repeat_interleave(torch.arange(len(masks)), lengths)
        counts = self._ranks.total(mask_counts(mask, sequence_index, num_sequences=len(masks)))
        weights = token_weights(
            mask,
            sequence_index,
            counts=counts,
            num_sequences=len(masks),
            max_new_tokens=self._config.rollout.sampling.max_new_tokens,
            config=self._config.algorithm.loss,
        )
        parts: tuple[Tensor, ...] = weights.split(lengths.tolist())
        return parts

    def _proximal(self, minibatches: Sequence[_Minibatch]) -> list[list[Tensor] | None]:
        """Proximal logprobs by minibatch and row; None where they come from the current ones.

        The first minibatch starts from the proximal weights themselves, so its current logprobs are proximal.
        """
        loss = self._config.algorithm.loss
        if loss.proximal != "recompute" or not loss.decoupled:
            return [None] * len(minibatches)
        with torch.no_grad():
            recomputed = [[self._logprobs(row, self.model).logprobs for row in m.rows] for m in minibatches[1:]]
        return [None, *recomputed]

    def _logprobs(self, row: Row, model: PreTrainedModel, entropy: Entropy = "none") -> TokenLogprobs:
        return packed_logprobs(model, entropy=entropy, **self._asked(row))

    def _asked(self, row: Row) -> dict[str, Any]:
        """What every question about a row says."""
        return {
            "input_ids": row.input_ids,
            "layout": row.layout,
            "predicts": row.predicts,
            "targets": row.targets,
            "temperature": self._config.rollout.sampling.temperature,
            "dtype": self._dtype,
        }

    def _optimize(self, minibatch: _Minibatch, proximal: list[Tensor] | None, result: StepResult) -> list[LossOutput]:
        """Gradients of all rows, then one optimizer step, unless something is not finite."""
        first = result.num_optimizer_steps + result.num_skipped == 0
        self.optimizer.zero_grad(set_to_none=True)
        entropy: Entropy = "value" if self._config.algorithm.loss.entropy_coefficient == 0 else "gradient"
        outputs = []
        for index, row in enumerate(minibatch.rows):
            loss_of = self._row_loss(minibatch, row, None if proximal is None else proximal[index], first=first)
            if self._config.algorithm.loss.of_tokens:
                loss, current = packed_loss(
                    self.model,
                    token_loss=lambda given, part, of=loss_of: of(given, part).loss,
                    entropy=entropy,
                    **self._asked(row),
                )
                output = replace(loss_of(current), loss=loss)
            else:
                output = loss_of(self._logprobs(row, self.model, entropy))
            output.loss.backward()
            outputs.append(replace(output, loss=output.loss.detach()))
        max_norm = self._config.learner.optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        result.gradient_norm = float(np.maximum(result.gradient_norm, norm.item()))  # unlike max, NaN stays
        if bool(torch.isfinite(norm)) and all(bool(torch.isfinite(output.loss)) for output in outputs):
            self.optimizer.step()
            self.schedule.step()
            result.num_optimizer_steps += 1
        else:
            result.num_skipped += 1
        return outputs

    def _row_loss(
        self, minibatch: _Minibatch, row: Row, proximal: Tensor | None, *, first: bool
    ) -> Callable[..., LossOutput]:
        """The loss as a function of current logprobs, of the whole row or of some of its tokens."""

        def of_row(by_trajectory: Sequence[Tensor]) -> Tensor:
            return torch.cat([by_trajectory[i] for i in row.trajectory_index]).to(self._device)

        algorithm = self._config.algorithm
        behaviour, weights = of_row(minibatch.behaviour), of_row(minibatch.weights)
        advantages, staleness = of_row(minibatch.advantages), of_row(minibatch.staleness)
        reference = of_row(minibatch.reference) if self._kl_in_loss else None

        def loss(current: TokenLogprobs, part: slice = slice(None)) -> LossOutput:
            anchor = current.logprobs.detach() if proximal is None else proximal[part]
            if proximal is None and algorithm.loss.proximal == "interpolate" and not first:
                anchor = interpolated_proximal(behaviour[part], anchor, staleness[part])
            output = policy_loss(
                behaviour_logprobs=behaviour[part],
                proximal_logprobs=anchor,
                current_logprobs=current.logprobs,
                entropy=current.entropy,
                advantages=advantages[part],
                token_weights=weights[part],
                staleness=staleness[part],
                sequence_index=row.sequence_index[part],
                config=algorithm.loss,
            )
            if reference is None:
                return output
            estimate = kl_estimate(current.logprobs, reference[part], algorithm.kl.estimator)
            divergence = torch.where(weights[part] != 0, estimate, 0.0)
            return replace(output, loss=output.loss + self.kl_coefficient * (weights[part] * divergence).sum())

        return loss

    def _adapt(self, num_trajectories: int, result: StepResult) -> None:
        """Steer the KL coefficient, where a controller is asked for, after a step that was taken."""
        adaptive = self._config.algorithm.kl.adaptive
        if adaptive is None or self.reference is None or result.num_optimizer_steps == 0:
            return
        self.kl_coefficient = adapted_coefficient(
            self.kl_coefficient,
            divergence=result.reference_divergence,
            num_trajectories=num_trajectories,
            config=adaptive,
        )
