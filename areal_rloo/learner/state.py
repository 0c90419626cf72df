"""The state of a learner in a checkpoint, without weights and optimizer: a message that `checkpoint` writes and reads.

    ledger, stream, buffered trajectories of the intake ─► captured (on its loop) ─► encoded ─► LearnerState ─► bytes

Trajectories are in the encoding of the wire. A state that was read is checked: some run can have this state, and no
token is newer than the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import CheckpointError, DecodeError
from areal_rloo.files import in_pieces, of_pieces
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream, PromptStreamState
from areal_rloo.intake.saved_ledger import LedgerState, by_sample, ledger_of, ledger_state
from areal_rloo.learner.stretches import STATE_NAME
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.columns import Limits, TrajectoryHeader, decode_columns, encode_columns
from areal_rloo.wire.messages import Count, History, Version
from areal_rloo.wire.turns import decode_turns

_FORMAT = 11
_Sum = Annotated[float, Meta(ge=-1e12, le=1e12)]  # rounding may make a small sum negative


class Totals(msgspec.Struct):
    """Sums over the whole run, kept across restarts."""

    trained_tokens: Count = 0
    masked_tokens: Count = 0
    generated_tokens: Count = 0
    staleness_tokens: dict[int, Count] = msgspec.field(default_factory=dict)
    skipped_steps: Count = 0
    failed_checkpoints: Count = 0
    wall_s: _Sum = 0.0
    learner_idle_s: _Sum = 0.0
    rollout_idle_s: _Sum = 0.0
    rollout_busy_s: _Sum = 0.0
    decoding_s: _Sum = 0.0


class _Format(msgspec.Struct, frozen=True):
    """The part of the state that every format has."""

    format: int


class LearnerState(_Format, frozen=True):
    """The state except weights and optimizer. Buffered trajectories are stored in the encoding of the wire."""

    policy_version: Version
    history: Annotated[History, Meta(min_length=1)]  # the learners that led to these weights
    ledger: LedgerState
    headers: tuple[TrajectoryHeader, ...]
    columns: tuple[bytes, ...]  # `in_pieces`
    stream: PromptStreamState
    totals: Totals
    kl_coefficient: Annotated[float, Meta(ge=0, le=1e300)]
    num_optimizer_steps: Count
    base: str  # digest of the model with which the run began (`models/stored.py`)


class Captured(NamedTuple):
    """What the intake adds to a checkpoint. Trajectories never change, so these are the intake's own."""

    ledger: LedgerState
    stream: PromptStreamState
    buffered: list[Trajectory]

    def encoded(self) -> dict[str, Any]:
        """Give the fields of LearnerState; takes time by the tokens, so not on the loop of the intake."""
        headers, columns = encode_columns(self.buffered)
        encoded = {"headers": headers, "columns": in_pieces(columns)}
        return {"format": _FORMAT, "ledger": self.ledger, "stream": self.stream, **encoded}


def capture(ledger: Ledger, stream: PromptStream) -> Captured:
    """Capture the current state; call while ledger and stream do not change."""
    buffered = [t for g in ledger.groups.values() for s in g.samples.values() for t in s.trajectories]
    return Captured(ledger_state(ledger), stream.state(), buffered)


def restore_ledger(state: LearnerState, stream: PromptStream) -> Ledger:
    """Restore ledger and stream from a checkpoint; samples that were in flight wait to be leased again."""
    stream.restore(state.stream)
    prompts = {group.group_id: stream.prompt(group.epoch, group.item_index) for group in state.ledger.groups}
    return ledger_of(state.ledger, prompts, by_sample(_trajectories(state)))


def decode_state(encoded: bytes, folder: Path) -> LearnerState:
    """Decode the state of a checkpoint; `folder` names the checkpoint in errors.

    Raises:
        DecodeError: the bytes are damaged, or no ledger has this state.
        CheckpointError: the checkpoint has another format.
    """
    found = from_msgpack(encoded, _Format, name=STATE_NAME).format
    if found != _FORMAT:
        raise CheckpointError(
            f"{folder}: format {found}, this version reads {_FORMAT}; resume with the version that wrote the "
            "checkpoint, or start again with another run.folder"
        )
    state = from_msgpack(encoded, LearnerState, name=STATE_NAME)
    try:
        trajectories = _trajectories(state)
        _check_ledger(state.ledger, by_sample(trajectories).keys())
        _check_versions(state, trajectories)
    except DecodeError as error:
        raise DecodeError(f"{STATE_NAME}: {error}") from error
    return state


def _trajectories(state: LearnerState) -> tuple[Trajectory, ...]:
    limits = Limits(max_trajectories=len(state.headers))
    trajectories, _ = decode_columns(state.headers, of_pieces(state.columns), limits)
    return trajectories


def _check_ledger(ledger: LedgerState, buffered: Set[SampleId]) -> None:
    """Check that a ledger can have this state, with trajectories of these samples.

    Raises:
        DecodeError: names the group, the sample or the counts.
    """
    seen: dict[SampleId, bool] = {}
    numbers = {group.group_id for group in ledger.groups}
    if len(numbers) < len(ledger.groups) or not all(0 <= number < ledger.admitted_groups for number in numbers):
        raise DecodeError(f"groups: expected each once, numbered below {ledger.admitted_groups}")
    for group in ledger.groups:
        for sample in group.samples:
            sample_id = (group.group_id, sample.sample_index)
            if sample_id in seen:
                raise DecodeError(f"sample {sample_id} is there twice")
            seen[sample_id] = sample.buffered
    different = min(buffered ^ {sample_id for sample_id, is_buffered in seen.items() if is_buffered}, default=None)
    if different is not None:
        raise DecodeError(f"sample {different}: expected trajectories if, and only if, the sample is buffered")
    num_done = ledger.trained + sum(ledger.dropped.values())
    if ledger.admitted != num_done + len(seen):
        raise DecodeError(f"ledger: {ledger.admitted} admitted samples, {num_done} done and {len(seen)} live")


def _check_versions(state: LearnerState, trajectories: Iterable[Trajectory]) -> None:
    """Check partial rollouts, and that no version is newer than the state.

    Raises:
        DecodeError: names the group, the sample, or the history.
    """
    newest, begun = state.policy_version, [version for _, version in state.history]
    if begun != sorted(begun) or begun[-1] > newest:
        raise DecodeError(f"history: expected versions up to {newest} in order, got {begun}")
    for group in state.ledger.groups:
        if not group.admission_version <= min(newest, group.deadline):
            raise DecodeError(
                f"group {group.group_id}: expected an admission version up to {newest} and the deadline "
                f"{group.deadline}, got {group.admission_version}"
            )
    partials = [decode_turns(sample.partial) for group in state.ledger.groups for sample in group.samples]
    sampled = [trajectory.completion for trajectory in trajectories]
    sampled += [turn.completion for turns in partials for turn in turns]
    highest = max((int(completion.versions.max(initial=0)) for completion in sampled), default=0)
    if highest > newest:
        raise DecodeError(f"samples: expected tokens of versions up to {newest}, got {highest}")
