"""One train step: takes a batch of groups, changes the weights of the model, gives the numbers of the step.

    masks ─► reference logprobs ─► advantages ─► minibatches, in rows for every rank ─► trained
           trained: proximal logprobs ─► for each pass, for each minibatch: forward, backward, clip, AdamW

Every arrow is a stage that returns a result; `StepResult` holds the results. Runs on the training thread of rank 0,
which sees the whole batch; without a reference policy, a thread may run the stages up to the rows before (`ahead.py`).
The ranks compute everything that needs the policy (`LearnerRank`). A minibatch without a finite gradient changes no
weight; the result counts the minibatch as skipped.

The state before the step, the batch and the config decide every number but the measured times: `areal_rloo.replay`
repeats a step to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_rloo.algorithm.diagnostics import describe_tokens, diagnose
from areal_rloo.algorithm.kl import Estimator, adapted_coefficient, kl_estimate
from areal_rloo.algorithm.loss import sample_weights
from areal_rloo.algorithm.own_parts import load_own_parts
from areal_rloo.config import Config
from areal_rloo.learner.adapters import lost_share
from areal_rloo.learner.advantages import Advantages, Masks, Samples, compute_advantages, loss_masks, policy_tokens
from areal_rloo.learner.costs import speed
from areal_rloo.learner.own_weights import own_factors
from areal_rloo.learner.packing import PackedBatch, pack
from areal_rloo.learner.rank import Times
from areal_rloo.learner.team import Team, TrainCommands
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trace import span
from areal_rloo.trajectory import Group, Trajectory

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReferenceScores:
    """The reference policy's view of a batch."""

    logprobs: list[Tensor]  # of each trajectory [num_completion_tokens] float32, in CPU memory; empty if no reference
    divergence: float  # KL of the behaviour policy to the reference by the configured estimator; NaN if no reference
    numbers: Mapping[str, float]  # by field of TrainRecord
    times: Times


class Prepared(NamedTuple):
    """A batch for the ranks."""

    policy_version: int
    samples: Samples
    masks: Masks
    reference: ReferenceScores
    advantages: Advantages
    minibatches: list[PackedBatch]
    commands: TrainCommands


@dataclass(frozen=True, slots=True)
class Updates:
    """The optimizer steps of a train step."""

    num_optimizer_steps: int  # minibatches that changed the weights
    num_skipped: int  # minibatches whose gradient was not finite
    numbers: Mapping[str, Any]  # by field of TrainRecord
    times: Times  # of the slowest rank


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of the stages of a train step; both mappings are by field of TrainRecord."""

    masks: Masks
    reference: ReferenceScores
    advantages: Advantages
    updates: Updates
    numbers: Mapping[str, Any]  # decided by state, batch and config: a replay gives the same
    measured: Mapping[str, Any]  # times, and rates made of them


class TrainStep:
    """Trains the policy on batches. One per learner, on rank 0."""

    def __init__(self, team: Team, config: Config, *, stop_token_ids: Sequence[int] = ()) -> None:
        """`stop_token_ids`: the tokens that end a completion; needed for a penalty on a missing end."""
        kl = config.algorithm.kl
        assert team.has_reference == (kl.coefficient > 0), "a reference model if and only if there is a KL term"
        self.team = team
        self.kl_coefficient = kl.coefficient
        self._config = config
        self._pack = partial(pack, max_tokens=config.learner.microbatch_tokens, num_ranks=team.num_ranks)
        own, stops = load_own_parts(config.algorithm), frozenset(stop_token_ids)
        self._advantages = partial(compute_advantages, config=config, stop_token_ids=stops, own_norm=own.advantages)
        self._own_weights = own.sample_weights
        self._kl_in_loss = kl.coefficient > 0 and kl.placement == "loss"
        # A reference needs the ranks; the user's functions may need the training thread.
        self.can_prepare_ahead = not team.has_reference and own.advantages is None and own.sample_weights is None

    def resume(self, kl_coefficient: float) -> None:
        """Go on with the adapted coefficient of a checkpoint. Without `kl.adaptive`, the config decides."""
        kl = self._config.algorithm.kl
        if kl.adaptive is None or kl_coefficient == 0:  # 0: the run had no KL term
            return
        self.kl_coefficient = kl_coefficient
        logger.info(
            "algorithm.kl.adaptive goes on from the checkpoint's coefficient %g; algorithm.kl.coefficient=%g is for "
            "the start of a run alone",
            *(kl_coefficient, kl.coefficient),
        )

    def step(self, groups: Sequence[Group], *, policy_version: int) -> StepResult:
        """Train once on a batch at this version."""
        started_s = time.perf_counter()
        return self.train(self.prepare(groups, policy_version=policy_version), started_s=started_s)

    def prepare(self, groups: Sequence[Group], *, policy_version: int, track: str = "training") -> Prepared:
        """Mask, normalize, pack and encode a batch for the step at this version; `track` is for the trace."""
        samples = Samples([trajectory for group in groups for trajectory in group.trajectories])
        masks = loss_masks(samples, policy_version=policy_version, config=self._config.algorithm)
        with span(track, "reference"):
            reference = self._reference(samples.trajectories, policy_version)
        in_advantages = () if self._kl_in_loss else reference.logprobs
        advantages = self._advantages(samples, masks, in_advantages, kl_coefficient=self.kl_coefficient)
        with span(track, "packing"):
            minibatches = self._minibatches(samples, masks, reference, advantages, policy_version)
            rows = [minibatch.microbatches for minibatch in minibatches]
            commands = self.team.train_commands(rows, self.kl_coefficient)
        return Prepared(policy_version, samples, masks, reference, advantages, minibatches, commands)

    def train(self, prepared: Prepared, *, started_s: float) -> StepResult:
        """Let the ranks train on a batch; `started_s` is the beginning of the step, of the performance counter."""
        settings = {"learning_rate": self.team.learning_rate, "kl_coefficient": self.kl_coefficient}
        _, samples, masks, reference, advantages, minibatches, commands = prepared
        updates = self._train(commands, len(minibatches))
        adaptive = self._config.algorithm.kl.adaptive
        if updates.num_optimizer_steps > 0 and adaptive is not None:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient,
                divergence=reference.divergence,
                num_trajectories=len(samples.trajectories),
                config=adaptive,
            )
        tokens = describe_tokens(masks.staleness_tokens, masks.num_stale, masks.num_truncated)
        numbers = {**settings, **tokens, **reference.numbers, **advantages.numbers, **updates.numbers}
        times = {"times_s": reference.times | updates.times}
        trained = islice(cycle(minibatches), updates.num_optimizer_steps + updates.num_skipped)
        kept = [trajectory for minibatch in trained for trajectory in minibatch.trajectories]
        possible, all_s = self.team.num_ranks * self.team.own.peak_flops, time.perf_counter() - started_s
        measured = times | speed(self.team.own.policy, kept, all_s, peak_flops=possible, config=self._config)
        return StepResult(masks, reference, advantages, updates, numbers, measured)

    def _reference(self, trajectories: Sequence[Trajectory], policy_version: int) -> ReferenceScores:
        """Score a batch with the reference policy; refresh the reference first if this version asks for that."""
        started_s, times = time.perf_counter(), {}
        by_trajectory: list[Tensor] = []
        behaviour = scored = torch.empty(0)
        if self.team.has_reference:
            settings = self._config.model.reference
            assert settings is not None, "a reference model comes from its section"
            every = settings.refresh_every_n_versions
            if every is not None and policy_version > 0 and policy_version % every == 0:
                self.team.refresh_reference()
            packed = self._pack(trajectories)
            by_trajectory = packed.unpacked(self.team.score(packed.microbatches))
            written = torch.cat([policy_tokens(trajectory) for trajectory in trajectories])
            drawn = np.concatenate([trajectory.completion.behaviour_logprobs for trajectory in trajectories])
            behaviour = torch.from_numpy(drawn).double()[written]
            scored = torch.cat(by_trajectory).double()[written]
            times["reference"] = time.perf_counter() - started_s

        def divergence(estimator: Estimator) -> float:
            return float(kl_estimate(behaviour, scored, estimator).mean())

        numbers = {"reference_kl_k1": divergence("k1"), "reference_kl_k3": divergence("k3")}
        return ReferenceScores(by_trajectory, divergence(self._config.algorithm.kl.estimator), numbers, times)

    def _minibatches(
        self, samples: Samples, masks: Masks, reference: ReferenceScores, advantages: Advantages, policy_version: int
    ) -> list[PackedBatch]:
        """Deal the samples with a gradient to minibatches, in an order drawn from seed and version."""
        order = np.random.default_rng([self._config.run.seed, policy_version]).permutation(len(samples))
        own = None if self._own_weights is None else own_factors(self._own_weights, samples, masks, policy_version)
        all_live = self._kl_in_loss or self._config.algorithm.loss.entropy_coefficient != 0
        minibatches = []
        for share in np.array_split(order, min(self._config.learner.num_minibatches, len(order))):
            indices = np.isin(samples.number, share).nonzero()[0].tolist()
            weights = self._token_weights(masks.num_in_loss[indices], samples.number[indices])
            weight_of = dict(zip(indices, (weights if own is None else weights * own[indices]).numpy(), strict=True))
            # A trajectory without an advantage has a gradient only if a KL or an entropy is in the loss. Without a
            # gradient it is not computed, but its tokens count in the denominator. The first is kept for the metrics.
            live = [i for i in indices if all_live or advantages.any_of_tokens[i]] or indices[:1]
            kept = [samples.trajectories[i] for i in live]
            columns = {
                "behaviour": [trajectory.completion.behaviour_logprobs for trajectory in kept],
                "advantages": [advantages.of_tokens[i].numpy() for i in live],
                "weights": [masks.of_tokens[i].numpy() * weight_of[i] for i in live],
                "staleness": [policy_version - trajectory.completion.versions for trajectory in kept],
            }
            if self._kl_in_loss:
                columns["reference"] = [reference.logprobs[i].numpy() for i in live]
            minibatches.append(self._pack(kept, columns=columns))
        return minibatches

    def _token_weights(self, num_in_loss: Tensor, sample_numbers: Tensor) -> Tensor:
        """Give the share of a token of each trajectory in the mean over the minibatch."""
        index = torch.unique(sample_numbers, return_inverse=True)[1]  # from 0 in this minibatch
        weights = sample_weights(
            num_in_loss.new_zeros(int(index.max()) + 1).scatter_add(0, index, num_in_loss),
            max_new_tokens=self._config.rollout.sampling.max_new_tokens,
            config=self._config.algorithm.loss,
        )
        return weights[index].float()

    @span("training", "train")
    def _train(self, commands: TrainCommands, num_minibatches: int) -> Updates:
        """Let every rank train on a share of the rows, and merge the answers."""
        started_s = time.perf_counter()
        trained = self.team.train(commands)
        all_s = time.perf_counter() - started_s
        first, possible = trained[0], num_minibatches * self._config.learner.num_epochs_per_batch
        if len(first.stepped) < possible:
            logger.info(
                "learner.target_kl ended the train step after %d of %d minibatches", len(first.stepped), possible
            )
        times = {part: max(answer.times[part] for answer in trained) for part in first.times}
        numbers = {
            "loss": sum(sum(answer.losses) for answer in trained) / len(first.stepped),
            "gradient_norm": float(np.max(first.gradient_norms)),  # unlike max, NaN stays
            **diagnose(list(zip(*(answer.sums for answer in trained), strict=True))),
            "lora_lost_share": lost_share(rounding for answer in trained for rounding in answer.roundings),
        }
        times["exchange"] = max(0.0, all_s - sum(times.values()))
        return Updates(sum(first.stepped), first.stepped.count(False), numbers, times)
