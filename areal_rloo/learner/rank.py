"""One rank of the learner: its part of the policy and of the optimizer, and what it computes when it is told.

Rank 0 tells itself (`LearnerRank.obey`); the others wait for what it tells them (`follow`). Every rank is told the same
kind of thing at the same time, since computing one needs the parameters of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from areal_rloo.algorithm.loss import LossOutput, TokenOutcomes
from areal_rloo.config import Config
from areal_rloo.errors import CheckpointError, UserError
from areal_rloo.learner.adapters import named_weights
from areal_rloo.learner.commands import (
    Answer,
    Command,
    Done,
    GatherWeights,
    RefreshReference,
    SaveShards,
    Score,
    Scores,
    Stop,
    Times,
    Train,
    Trained,
    decode_command,
    encode,
)
from areal_rloo.learner.flops import peak_flops
from areal_rloo.learner.memory import estimate, is_out_of_memory, out_of_memory
from areal_rloo.learner.optimizer import empty_state, make_optimizer, set_schedule, states_on
from areal_rloo.learner.packing import Microbatch, Row
from areal_rloo.learner.parallel import (
    Ranks,
    Sharding,
    gather_weights,
    load_shards,
    norm_of_whole,
    save_shards,
    saved_names,
)
from areal_rloo.learner.row_loss import RowLoss
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.logprobs import Entropy, TokenLogprobs
from areal_rloo.models.policy import Policy
from areal_rloo.models.reference import Reference
from areal_rloo.weights.manifest import build_manifest

_RANDOM = "random."


class LearnerRank:
    """The policy, its optimizer, and what is done with them."""

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
        """
        Args:
            policy: on `device`, sharded where there are other ranks.
            config: `algorithm` and `learner`.
            device: where to compute.
            reference: the frozen policy of the KL term; None where there is none.
            ranks: the learner's ranks; None for the only one.
            sharding: how the policy is spread over them; None where it is whole.
        """
        self.policy = policy
        self.reference = reference
        self.ranks = ranks or Ranks()
        self._sharding = sharding
        self.manifest = build_manifest(
            named_weights(policy.causal),
            bucket_bytes=config.weights.bucket_bytes,
            dtype=computation_dtype(config.model),
        )
        self.peak_flops = peak_flops(device, configured=config.learner.peak_flops, dtype=config.model.dtype)
        self._config = config
        self._device = device
        offload = config.learner.offload
        self._home = torch.device("cpu") if offload == "parameters" else device  # of parameters between two layers
        self._resting = torch.device("cpu") if offload == "optimizer" else self._home
        settings = config.model.reference
        self._refreshes = settings is not None and settings.refresh_every_n_versions is not None
        self._saving: Future[Any] | None = None
        learner = config.learner
        self.optimizer, self.schedule = make_optimizer(
            (parameter for parameter in policy.parameters() if parameter.requires_grad),
            learner.optimizer,
            num_optimizer_steps=learner.num_train_steps * learner.num_minibatches,
        )

    def obey(self, command: Command) -> Answer:
        """Do what was told, together with all ranks.

        Raises:
            UserError: there was not enough memory; says what was needed, and which options make it less.
        """
        with self._memory_explained():
            return self._obey(command)

    def _obey(self, command: Command) -> Answer:
        match command:
            case Score():
                return Scores(self._score(command))
            case Train():
                return self._train(command)
            case RefreshReference():
                assert self.reference is not None, "there is one to refresh"
                self.reference.refresh(named_weights(self.policy.causal))
            case GatherWeights():
                self.weights()
            case SaveShards():
                self.save(Path(command.folder))
            case Stop():
                raise AssertionError("the last word is not obeyed")
            case _:
                assert_never(command)
        return Done()

    def weights(self, buckets: Sequence[Tensor] | None = None) -> None:
        """Gather the whole weights into rank 0's buckets, laid out as `manifest` says; every rank calls it."""
        with self._memory_explained():
            gather_weights(self.manifest, named_weights(self.policy.causal), buckets, self._sharding)

    def save(self, folder: Path) -> Future[Any]:
        """Begin to write policy, optimizer and random state into `folder`; every rank calls it.

        The future ends when all ranks are done, or raises ShardsError.
        """
        with self._memory_explained():
            self._saving = save_shards(self.state(), folder, self.ranks)
        return self._saving

    def load(self, folder: Path, *, num_optimizer_steps: int) -> None:
        """Go on from what `save` wrote, on whatever number of ranks.

        Raises:
            CheckpointError: it does not fit this policy and optimizer.
        """
        names = saved_names(folder)
        for name, parameter in self._trained():
            if f"exp_avg.{name}" in names:
                self.optimizer.state[parameter] = empty_state(parameter, self.optimizer)
        state = {name: tensor for name, tensor in self.state().items() if not name.startswith(_RANDOM) or name in names}
        different = {name for name in names ^ state.keys() if not name.startswith(_RANDOM)}
        if different:
            raise CheckpointError(
                f"{folder}: does not fit this model and optimizer, {len(different)} tensors are in one alone, first "
                f"{min(different)}; resume with the config that wrote it"
            )
        load_shards(state, folder, self.ranks)
        random = state.get(f"{_RANDOM}{self.ranks.rank}")
        if random is not None:
            torch.set_rng_state(random)
        for name, parameter in self._trained():
            for key in self.optimizer.state.get(parameter, {}):
                self.optimizer.state[parameter][key] = state[f"{key}.{name}"]
        set_schedule(self.schedule, num_optimizer_steps)

    def finish_saving(self) -> None:
        """Wait for the last `save`; what went wrong, rank 0 says."""
        if self._saving is not None:
            self._saving.exception()

    @contextmanager
    def _memory_explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(self._memory_needed()) from error

    def _memory_needed(self) -> str:
        model = self.policy.causal.config
        num_parameters = sum(p.numel() for p in self.policy.parameters())
        num_trained = sum(p.numel() for _, p in self._trained())
        parts = estimate(model, self._config, num_parameters=num_parameters, num_trained=num_trained)
        return out_of_memory(model, self._config, self._device, parts)

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.policy.causal.named_parameters() if p.requires_grad)

    def state(self) -> dict[str, Tensor]:
        """Everything this rank has that changes, by name; the tensors themselves."""
        state: dict[str, Tensor] = {f"policy.{name}": p.detach() for name, p in self.policy.causal.named_parameters()}
        for name, parameter in self._trained():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value
        if self._refreshes and self.reference is not None:
            named = self.reference.policy.causal.named_parameters()
            state |= {f"reference.{name}": parameter.detach() for name, parameter in named}
        state[f"{_RANDOM}{self.ranks.rank}"] = torch.get_rng_state()
        return state

    def _score(self, command: Score) -> list[Tensor]:
        assert self.reference is not None, "there is one to ask"
        with torch.no_grad(), self.reference.loaded() as reference:
            return [self._logprobs(Row.of(m, self._device), reference).cpu() for m in command.microbatches]

    def _train(self, command: Train) -> Trained:
        trained = Trained([], [], [], [], {"proximal": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0})
        with self._timed(trained.times, "proximal"):
            proximal = self._proximal(command.minibatches)
        for index, (minibatch, anchors) in enumerate(zip(command.minibatches, proximal, strict=True)):
            self._optimize(minibatch, anchors, command.kl_coefficient, trained, first=index == 0)
        return trained

    def _proximal(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[list[Tensor | None]]:
        """Proximal logprobs by minibatch and row; None where they come from the current ones.

        The first minibatch starts from the proximal weights themselves, so its current logprobs are proximal.
        """
        loss = self._config.algorithm.loss
        if loss.proximal != "recompute" or not loss.decoupled:
            return [[None] * len(minibatch) for minibatch in minibatches]
        with torch.no_grad():
            recomputed: list[list[Tensor | None]] = [
                [self._logprobs(Row.of(m, self._device), self.policy) for m in minibatch]
                for minibatch in minibatches[1:]
            ]
        return [[None] * len(minibatches[0]), *recomputed]

    def _logprobs(self, row: Row, policy: Policy) -> Tensor:
        logprobs: Tensor = policy(row.input_ids, row.layout, row.predicts, row.targets)[0]
        return logprobs

    def _optimize(
        self,
        minibatch: Sequence[Microbatch],
        proximal: Sequence[Tensor | None],
        kl_coefficient: float,
        trained: Trained,
        *,
        first: bool,
    ) -> None:
        """Gradients of all rows, then one optimizer step, unless something is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        config = self._config.algorithm
        interpolates = config.loss.proximal == "interpolate" and config.loss.decoupled and not first
        outputs = []
        for microbatch, anchor in zip(minibatch, proximal, strict=True):
            with self._timed(trained.times, "forward"):
                row = Row.of(microbatch, self._device)
                output = self._loss(RowLoss(row, anchor, interpolates, kl_coefficient, config))
            with self._timed(trained.times, "backward"):
                output.loss.backward()
            outputs.append(replace(output, loss=output.loss.detach()))
        with self._timed(trained.times, "optimizer"):
            norm = norm_of_whole(self.policy.parameters(), self._config.learner.optimizer.max_grad_norm)
            loss = float(torch.stack([output.loss for output in outputs]).double().sum())
            finite = math.isfinite(norm) and math.isfinite(float(self.ranks.total(torch.tensor(loss))))
            if finite:
                with states_on(self.optimizer, self._home, home=self._resting):
                    self.optimizer.step()
                self.schedule.step()
        trained.stepped.append(finite)
        trained.gradient_norms.append(norm)
        trained.losses.append(loss)
        trained.outcomes.append(_joined([output.tokens for output in outputs]))

    def _loss(self, loss: RowLoss) -> LossOutput:
        config, row = self._config.algorithm.loss, loss.row
        entropy: Entropy = "value" if config.entropy_coefficient == 0 else "gradient"
        asked = (row.input_ids, row.layout, row.predicts, row.targets)
        if not config.of_tokens:
            return loss(TokenLogprobs(*self.policy(*asked, entropy=entropy)))
        total, *current = self.policy(*asked, entropy=entropy, token_loss=loss.of_tokens)
        with torch.no_grad():
            tokens = loss(TokenLogprobs(*current)).tokens
        return LossOutput(total, tokens)

    @contextmanager
    def _timed(self, times: Times, part: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # not all streams: a broadcast may be under way on another
        times[part] += time.perf_counter() - started_s


def follow(rank: LearnerRank) -> None:
    """Do what rank 0 says, until it says that the run is over."""
    while not isinstance(command := decode_command(rank.ranks.take()), Stop):
        rank.ranks.answer(encode(rank.obey(command)))
    rank.finish_saving()


def _joined(outcomes: Sequence[TokenOutcomes]) -> dict[str, Tensor]:
    names = [field.name for field in fields(TokenOutcomes)]
    return {name: torch.cat([getattr(one, name) for one in outcomes]).cpu() for name in names}
