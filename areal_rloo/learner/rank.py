"""A rank of the learner: holds a part of policy and optimizer, and computes on command of rank 0 (`team`).

All ranks execute the same kind of command at the same time, because computing on any rank needs the parameters of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from areal_rloo.algorithm.diagnostics import Sums, measure
from areal_rloo.algorithm.loss import LossOutput, TokenOutcomes
from areal_rloo.algorithm.own_parts import load_own_loss
from areal_rloo.config import Config
from areal_rloo.learner.adapters import Form, Rounding, named_weights, rounding
from areal_rloo.learner.costs import counted, memory_explained, peak_flops
from areal_rloo.learner.optimizer import make_optimizer, make_states, set_schedule, step_with_states_from
from areal_rloo.learner.packing import Microbatch, Row, RowLoss
from areal_rloo.learner.parallel.files import load_shards, save_shards, state_of
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.parallel.sharding import Sharding, clip_to_norm, gather_weights
from areal_rloo.models.device import finish_stream
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.loading import Reference
from areal_rloo.models.policy import Entropy, Policy, TokenLogprobs
from areal_rloo.telemetry.trace import span
from areal_rloo.weights.manifest import Manifest, build_manifest

Times = dict[str, float]
"""Seconds by part of a step: reference, proximal, forward, backward, optimizer, rounding (of merged adapters)."""


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """Results of a rank on a share of each minibatch; the lists are by minibatch, those of all passes."""

    stepped: list[bool]  # True if everything was finite on all ranks
    gradient_norms: list[float]  # over all ranks, before clipping
    losses: list[float]  # the sum over the rows of this rank
    sums: list[Sums]  # over the tokens of this rank
    times: Times
    roundings: list[Rounding] = []  # of merged adapters after the step; empty if none are merged


class LearnerRank:
    """A policy, an optimizer, and the computations on both. All explain missing memory (`costs.memory_explained`)."""

    def __init__(
        self,
        policy: Policy,
        config: Config,
        *,
        device: torch.device,
        reference: Reference | None = None,
        ranks: Ranks | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """The policy is on `device`, and sharded if there are other ranks; no `ranks` are a single rank."""
        learner, settings = config.learner, config.model.reference
        self.policy, self.reference, self.ranks, self.base = policy, reference, ranks or Ranks(), ""
        self._model = counted(policy)
        self.apart_manifest = self._manifest(config, "apart")
        self._published: Form = "adapters" if config.publishes_adapters else "merged"
        self.manifest = self._manifest(config, self._published)
        self._rounds = config.learner.lora is not None and config.rollout.server is not None
        self.peak_flops = peak_flops(device, configured=learner.peak_flops, dtype=config.model.dtype)
        self.optimizer, self.schedule = make_optimizer(
            policy, learner.optimizer, num_optimizer_steps=learner.num_train_steps * learner.updates_per_step
        )
        self._config, self._device, self._sharding = config, device, sharding
        self._home = torch.device("cpu") if learner.offload == "parameters" else device  # of parameters between layers
        self._resting = torch.device("cpu") if learner.offload == "optimizer" else self._home
        refreshes = settings is not None and settings.refresh_every_n_versions is not None
        self._refreshed = reference.policy if reference is not None and refreshes else None
        self._saving: Future[Any] | None = None
        self._own = load_own_loss(config.algorithm.loss)

    def score(self, microbatches: Iterable[Microbatch]) -> list[Tensor]:
        """Compute the logprobs of the targets under the reference: of each row [num_targets] float32, on the CPU."""
        assert self.reference is not None, "scoring needs a reference"
        with self._memory_explained(), torch.no_grad(), self.reference.loaded() as reference:
            return [self._logprobs(microbatch, reference).cpu() for microbatch in microbatches]

    def train(self, minibatches: Sequence[Sequence[Microbatch]], kl_coefficient: float) -> Trained:
        """Take an optimizer step for each minibatch, in `num_epochs_per_batch` passes, or until `target_kl` ends them.

        `RowLoss` documents the columns of the rows.
        """
        trained = Trained([], [], [], [], {"proximal": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0})
        with self._memory_explained():
            make_states(self.optimizer, self._resting)
            with self._timed(trained.times, "proximal"):
                proximal = self._proximal(minibatches)
            num_passes = self._config.learner.num_epochs_per_batch
            for minibatch, anchors in list(zip(minibatches, proximal, strict=True)) * num_passes:
                progress = sum(trained.stepped) / (len(minibatches) * num_passes)
                if not self._optimize(minibatch, anchors, progress, kl_coefficient, trained):
                    break
            if self._rounds:
                trained.times["rounding"] = 0.0
                with self._timed(trained.times, "rounding"):
                    trained.roundings.append(rounding(self.policy.causal, computation_dtype(self._config.model)))
        return trained

    def refresh_reference(self) -> None:
        """Copy the current weights of the policy into the reference."""
        assert self.reference is not None, "refresh needs a reference"
        with self._memory_explained("refreshing the reference"):
            self.reference.refresh(self.policy.causal.named_parameters())

    def weights(self, buckets: Sequence[Tensor] | None = None, *, apart: bool) -> None:
        """Gather the whole weights into rank 0's buckets; every rank calls this.

        `apart`: lay them out as in `apart_manifest`, with adapters apart; else as in `manifest`, as the engines get.
        """
        manifest = self.apart_manifest if apart else self.manifest
        named = named_weights(self.policy.causal, "apart" if apart else self._published)
        with self._memory_explained("gathering the weights"):
            gather_weights(manifest, named, buckets, self._sharding)

    def state(self) -> dict[str, Tensor]:
        """Return all changing tensors of this rank by name; not copies."""
        return state_of(self.policy, self.optimizer, self._refreshed, self.ranks.rank)

    def save(self, folder: Path) -> Future[Any]:
        """Start writing the state into `folder`; every rank calls this. The future is that of `save_shards`."""
        with self._memory_explained("copying the states for a checkpoint"):
            self._saving = save_shards(self.state(), folder, self.ranks)
        return self._saving

    def finish_saving(self) -> None:
        """Wait for the last `save`; rank 0 reports errors."""
        if self._saving is not None:
            self._saving.exception()

    def load(self, folder: Path, *, num_optimizer_steps: int) -> None:
        """Restore the state that `save` wrote, with any number of ranks; raises CheckpointError if it does not fit."""
        with self._memory_explained("reading a checkpoint", resumes=True):
            load_shards(folder, self.ranks, self.policy, self.optimizer, self._refreshed)
        set_schedule(self.schedule, num_optimizer_steps)

    def _manifest(self, config: Config, form: Form) -> Manifest:
        named = named_weights(self.policy.causal, form)
        # Adapters are small, and a merge must round the weights only once.
        dtype = torch.float32 if form == "adapters" else computation_dtype(config.model)
        return build_manifest(named, bucket_bytes=config.weights.bucket_bytes, dtype=dtype)

    def _memory_explained(self, work: str = "", *, resumes: bool = False) -> AbstractContextManager[None]:
        late = self.schedule.last_epoch > 0
        return memory_explained(self._model, self._config, self._device, late=late, work=work, resumes=resumes)

    def _proximal(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[list[Tensor | None]]:
        """Compute proximal logprobs by minibatch and row; None if they are derived from the current logprobs.

        The first minibatch starts from the proximal weights, so the current logprobs are the proximal logprobs;
        `_optimize` keeps them for the next pass.
        """
        recompute = self._config.algorithm.loss.recomputes
        with torch.no_grad():
            return [
                [self._logprobs(row, self.policy) if recompute and index > 0 else None for row in minibatch]
                for index, minibatch in enumerate(minibatches)
            ]

    def _logprobs(self, microbatch: Microbatch, policy: Policy) -> Tensor:
        logprobs: Tensor = policy(*Row.of(microbatch, self._device).inputs)[0]
        return logprobs

    def _optimize(
        self,
        minibatch: Sequence[Microbatch],
        anchors: list[Tensor | None],
        progress: float,
        kl_coefficient: float,
        trained: Trained,
    ) -> bool:
        """Add up the gradients of all rows, then take an optimizer step if loss and gradient are finite.

        Returns False, without a step, if the policy is past `target_kl`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        keeps = self._config.algorithm.loss.recomputes and self._config.learner.num_epochs_per_batch > 1
        outputs = []
        for index, (microbatch, anchor) in enumerate(zip(minibatch, anchors, strict=True)):
            with self._timed(trained.times, "forward"):
                row = Row.of(microbatch, self._device)
                output = self._loss(RowLoss(row, anchor, progress, kl_coefficient, self._config.algorithm, self._own))
            with self._timed(trained.times, "backward"):
                output.loss.backward()
            outputs.append(output._replace(loss=output.loss.detach()))
            if anchor is None and keeps:
                in_loss, logprobs = row.columns["weights"] != 0, output.tokens.current_logprobs
                anchors[index] = logprobs.new_zeros(len(in_loss)).masked_scatter(in_loss, logprobs)
        sums = measure(TokenOutcomes.joined([output.tokens for output in outputs]))
        with self._timed(trained.times, "optimizer"):
            norm = clip_to_norm(self.policy.parameters(), self._config.learner.optimizer.max_grad_norm)
            loss = float(torch.stack([output.loss for output in outputs]).double().sum())
            moved = sums.of_tokens["proximal_k3" if self._config.algorithm.loss.decoupled else "behaviour_k3"]
            total, divergence, num = self.ranks.total(torch.tensor([loss, moved.total, moved.num])).tolist()
            if trained.stepped and divergence > num * (self._config.learner.target_kl or math.inf):
                return False
            finite = math.isfinite(norm) and math.isfinite(total)
            if finite:
                step_with_states_from(self.optimizer, self._resting, self._home)
                self.schedule.step()
        trained.stepped.append(finite)
        trained.gradient_norms.append(norm)
        trained.losses.append(loss)
        trained.sums.append(sums)
        return True

    def _loss(self, loss: RowLoss) -> LossOutput:
        """Compute the loss in the forward pass, chunk by chunk if the loss is a sum over tokens."""
        config = self._config.algorithm.loss
        entropy: Entropy = "value" if config.entropy_coefficient == 0 else "gradient"
        if not config.of_tokens:
            return loss(TokenLogprobs(*self.policy(*loss.row.inputs, entropy=entropy)))
        total, *current = self.policy(
            *loss.row.inputs, entropy=entropy, token_loss=lambda logprobs, part: loss(logprobs, part).loss
        )
        with torch.no_grad():
            return LossOutput(total, loss(TokenLogprobs(*current)).tokens)

    @contextmanager
    def _timed(self, times: Times, part: str) -> Iterator[None]:
        started_s = time.monotonic()
        with span("training", part):
            yield
            finish_stream(self._device)
        times[part] += time.monotonic() - started_s
