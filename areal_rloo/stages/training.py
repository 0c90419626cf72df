"""Train a learner in this process on groups that are there already: no workers, no ports, no intake.

    PromptStream (order, passes) ─► groups ─► TrainStep.step ─► line, record ─► at times: held-out loss, checkpoint

`sft` and `offline` are two sources of groups. Config, groups and checkpoint decide every number: on the same kind of
CPU, with the same software and number of threads, a resumed run repeats the steps to the bit. A full disk costs records
and checkpoints, but no steps. The first Ctrl-C or SIGTERM ends the run after the step, with a checkpoint.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config
from areal_rloo.errors import TrainingError, UnsavedError
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.learner.advantages import policy_tokens
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.checkpoint_folder import checkpoint_path
from areal_rloo.learner.reporting import batch_numbers
from areal_rloo.learner.state import LearnerState, Totals, capture
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.stages.held_out import HeldOut, measure
from areal_rloo.tasks import Item, Source
from areal_rloo.tasks.base import LazyItems
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.record_file import RecordFile
from areal_rloo.trajectory import Group, Trajectory
from areal_rloo.wire.messages import History

logger = get_logger(__name__)

Numbers = Mapping[str, Any]
Show = Callable[[Numbers], str]
"""Returns the words of a line about a record."""


Groups = Sequence[tuple[Trajectory, ...]]
"""The trajectories of each group."""


class Data(NamedTuple):
    """Groups to train on, by source, and examples to measure, by name of the set."""

    sources: Sequence[tuple[Source, Groups]]  # `source_of` makes the source
    held_out: Mapping[str, Sequence[Trajectory]]

    @property
    def groups(self) -> list[tuple[Trajectory, ...]]:
        """The groups of all sources, by the item number of a prompt."""
        return [group for _, groups in self.sources for group in groups]

    def stream(self, config: Config) -> PromptStream:
        sources = [source for source, _ in self.sources]
        return PromptStream(sources, lambda item, number: (), seed=config.run.seed, num_epochs=config.data.num_epochs)


def source_of(label: str, groups: Groups, weight: float | None = None) -> Source:
    """Make the source of groups: items that name a digest, so that a resume notices other groups."""

    def item(index: int) -> Item:
        digest = hashlib.blake2b(digest_size=16)
        for each in groups[index]:
            completion = each.completion
            for part in (each.prompt_tokens, completion.tokens, completion.behaviour_logprobs, np.array(each.reward)):
                digest.update(part.tobytes())
        return Item(digest.hexdigest(), source=label)

    return Source(label, LazyItems(len(groups), item), weight)


@dataclass(kw_only=True)
class Training:
    """A run of train steps. `config` is that of the user, for checkpoints; `learner_config` is that of the learner."""

    config: Config
    learner_config: Config
    folder: Path
    data: Data
    stream: PromptStream
    train_step: TrainStep
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    checkpoints: Checkpoints
    show: Show
    policy_version: int
    history: History
    records: RecordFile = field(init=False)
    groups: Groups = field(init=False)
    stopping: bool = field(default=False, init=False)
    _num_groups: int = field(default=0, init=False)
    _has_lost_records: bool = field(default=False, init=False)
    _num_failed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.groups = self.data.groups

    def run(self) -> bool:
        """Train to the end; return False if a signal ended the run before.

        Raises:
            TrainingError: too many steps in a row were not finite.
            UnsavedError: the last checkpoint failed.
        """
        last = self.config.learner.num_train_steps
        if self.policy_version == 0:
            self._measure()
        measured_at = saved_at = self.policy_version
        while self.policy_version < last and not self.stopping:
            batch = self._batch()
            if not batch:
                break
            self._step(batch)
            every = self.config.evaluation.every_n_versions
            if every > 0 and self.policy_version % every == 0 and not self.stopping:
                self._measure()
                measured_at = self.policy_version
            every = self.config.checkpoint.every_n_steps  # and version 1: too little memory or disk shows early
            if every > 0 and (self.policy_version % every == 0 or self.policy_version == 1):
                self._save()
                saved_at = self.policy_version
        if not self.stopping and measured_at < self.policy_version:
            self._measure()
        if saved_at < self.policy_version:
            self._save()
        if not self.checkpoints.wait():
            raise UnsavedError(
                f"version {self.policy_version} could not be saved: the steps since the newest whole checkpoint are "
                "lost; free some disk, then --resume"
            )
        return not self.stopping

    def stop_on_signals(self) -> None:
        """Let the first signal end the run after the step, and the second signal at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            del frame
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.default_int_handler)
            self.stopping = True
            _say("stopping after this step, with a checkpoint; once more to stop at once")

        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, stop)

    def _batch(self) -> list[Group]:
        """Take the groups of the next step; none at the end of the data. Tokens get the present version."""
        batch: list[Group] = []
        while len(batch) < self.config.learner.groups_per_step and (prompt := self.stream.take()) is not None:
            number = self._num_groups = self._num_groups + 1  # a group may come twice in a batch, between two passes
            trajectories = tuple(
                _tagged(trajectory, number, self.policy_version) for trajectory in self.groups[prompt.item_index]
            )
            source = prompt.item.source
            batch.append(Group(number, self.policy_version, trajectories, source, prompt.epoch, prompt.item_index))
        return batch

    def _step(self, batch: Sequence[Group]) -> None:
        """Train until a batch changes the weights."""
        num_refused, started_s, step = 0, time.monotonic(), self.train_step.step
        while (result := step(batch, policy_version=self.policy_version)).updates.num_optimizer_steps == 0:
            num_refused += 1
            logger.error("version %d: loss or gradient is not finite; the batch is dropped", self.policy_version)
            most = self.config.learner.max_skipped_steps
            if num_refused > most or not (batch := self._batch()):
                raise TrainingError(
                    f"{num_refused} steps in a row were not finite, more than learner.max_skipped_steps={most}; lower "
                    "the learning rate, or look at the data"
                )
        self.policy_version += 1
        record = {
            "kind": "step",
            "policy_version": self.policy_version,
            "epoch": max(group.epoch for group in batch),
            "behaviour_loss": _behaviour_loss(batch),
            "step_s": time.monotonic() - started_s,
            **batch_numbers(batch),
            **result.numbers,
            **result.measured,
        }
        self._append(record)
        print(f"step {self.policy_version}/{self.config.learner.num_train_steps}: {self.show(record)}", flush=True)  # noqa: T201 - users read this line

    def _measure(self) -> None:
        """Measure the loss of every held-out set."""
        for name, examples in self.data.held_out.items():
            policy = self.train_step.team.own.policy
            found: HeldOut = measure(policy, examples, self.learner_config, self.device)
            self._append({"kind": "held_out", "policy_version": self.policy_version, "name": name, **found._asdict()})
            print(f"{name}: {found.words()}", flush=True)  # noqa: T201

    def _append(self, record: Numbers) -> None:
        try:
            self.records.append(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            if not self._has_lost_records:
                _say(f"the disk refuses records ({error.strerror}): the training goes on without; free some disk")
            self._has_lost_records = True

    def _save(self) -> None:
        """Copy the state, and begin to write a checkpoint."""
        team = self.train_step.team
        state = LearnerState(
            policy_version=self.policy_version,
            history=self.history,
            totals=Totals(),
            kl_coefficient=self.train_step.kl_coefficient,
            num_optimizer_steps=team.num_optimizer_steps,
            base=team.own.base,
            **capture(Ledger(), self.stream).encoded(),
        )
        self.checkpoints.save(state, self.config, team, self.tokenizer)
        if self.checkpoints.num_failed > self._num_failed:  # of the writes before this one
            self._num_failed = self.checkpoints.num_failed
            _say("a checkpoint could not be written (logs): the training goes on, the one before stays; free some disk")


def run_to_end(training: Training) -> int:
    """Run a training; print the folder of the model, and return the exit code."""
    training.stop_on_signals()
    print(f"run folder: {training.folder}", flush=True)  # noqa: T201 - users read this line
    last = training.config.learner.num_train_steps
    if training.policy_version >= last:
        print(f"nothing is left to train: raise learner.num_train_steps={last} to go on")  # noqa: T201
    try:
        done = training.run()
    except KeyboardInterrupt:
        _say("stopped at once; --resume goes on from the newest checkpoint")
        return 130
    finally:
        training.checkpoints.wait()
        training.records.close()
    if done:
        print(checkpoint_path(training.checkpoints.folder, training.policy_version) / "model")  # noqa: T201
    else:
        print(f"stopped at step {training.policy_version}; go on with --resume run.folder={training.folder}")  # noqa: T201
    return 0 if done else 130


def _behaviour_loss(batch: Sequence[Group]) -> float:
    """Return the mean of - log behaviour over the policy's tokens; 0 for demonstrations, which have no logprobs."""
    trajectories = [trajectory for group in batch for trajectory in group.trajectories]
    logprobs = [each.completion.behaviour_logprobs[policy_tokens(each).numpy()] for each in trajectories]
    return -float(np.concatenate(logprobs).mean(dtype=np.float64))


def _tagged(trajectory: Trajectory, group_id: int, version: int) -> Trajectory:
    """Give a trajectory the number of its group, and all tokens a version."""
    versions = np.full_like(trajectory.completion.versions, version)
    completion = msgspec.structs.replace(trajectory.completion, versions=versions)
    return msgspec.structs.replace(trajectory, group_id=group_id, completion=completion)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - users read this line
