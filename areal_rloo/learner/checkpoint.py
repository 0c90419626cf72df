"""Checkpoints: everything a learner needs to go on, whole or not at all.

    checkpoints/step-000025/    shards/ (weights, optimizer and random states, of all ranks)   state.msgpack
                                model/ (Hugging Face format)   checksums.json

Written into a hidden folder, flushed to disk, and renamed; a folder with that name is whole. Ledger, prompt stream and
buffered trajectories are in it, so no prompt is skipped or trained on twice. Any number of ranks reads the shards.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_rloo.errors import CheckpointError
from areal_rloo.learner.export import write_model
from areal_rloo.learner.ledger import Ledger, LedgerState, by_sample
from areal_rloo.learner.prompts import PromptStream, PromptStreamState
from areal_rloo.learner.team import Team
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.wire.columns import Limits, TrajectoryHeader, decode_columns, encode_columns

logger = get_logger(__name__)

_FORMAT = 4


class Totals(msgspec.Struct):
    """Sums over the whole run, kept over a restart."""

    trained_tokens: int = 0
    masked_tokens: int = 0
    generated_tokens: int = 0
    staleness_tokens: dict[int, int] = msgspec.field(default_factory=dict)
    skipped_steps: int = 0
    failed_checkpoints: int = 0
    wall_s: float = 0.0
    learner_idle_s: float = 0.0
    rollout_idle_s: float = 0.0


class _Format(msgspec.Struct, frozen=True):
    """What states of all formats have."""

    format: int


class LearnerState(msgspec.Struct, frozen=True):
    """What is neither weights nor optimizer. Buffered trajectories are kept as they travel on the wire."""

    format: int
    policy_version: int
    seed: int
    ledger: LedgerState
    headers: tuple[TrajectoryHeader, ...]
    columns: tuple[bytes, ...]
    stream: PromptStreamState
    totals: Totals
    kl_coefficient: float
    num_optimizer_steps: int


def capture(
    ledger: Ledger,
    stream: PromptStream,
    *,
    policy_version: int,
    seed: int,
    totals: Totals,
    kl_coefficient: float,
    num_optimizer_steps: int,
) -> LearnerState:
    """The learner's state at this moment; call where ledger and stream stand still."""
    buffered = [t for g in ledger.groups.values() for s in g.samples.values() for t in s.trajectories]
    headers, columns = encode_columns(buffered)
    return LearnerState(
        format=_FORMAT,
        policy_version=policy_version,
        seed=seed,
        ledger=ledger.state(),
        headers=headers,
        columns=tuple(bytes(column) for column in columns),
        stream=stream.state(),
        totals=totals,
        kl_coefficient=kl_coefficient,
        num_optimizer_steps=num_optimizer_steps,
    )


def restore_ledger(state: LearnerState, stream: PromptStream) -> Ledger:
    """The ledger of a checkpoint; what was in flight waits to be leased again. The stream is set back too."""
    stream.restore(state.stream)
    decoded = decode_columns(state.headers, state.columns, Limits(max_trajectories=len(state.headers)))
    trajectories = by_sample(decoded)
    prompts = {group.group_id: stream.prompt(group.epoch, group.item_index) for group in state.ledger.groups}
    return Ledger.restored(state.ledger, prompts, trajectories)


class Checkpoints:
    """The checkpoints of one run. One is written at a time, on a thread of its own, while training goes on.

    Attributes:
        folder: of all of them.
        num_failed: that could not be written since this process began.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._newest_is_whole = True
        self.num_failed = 0

    def save(self, state: LearnerState, *, team: Team, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy this moment and begin to write it; waits for the checkpoint before, and drops the oldest beyond `keep`.

        If the disk refuses, there is an alarm in the log, it is counted, and training goes on.
        """
        self.wait()
        target = self.folder / f"step-{state.policy_version:06d}"
        unfinished = self.folder / f".unfinished-{state.policy_version:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / "shards").mkdir(parents=True)
        except OSError as error:
            self._failed(target, error)
            return
        shards = team.save_shards(unfinished / "shards")
        weights = team.whole_weights()
        self._writing = self._writer.submit(self._write, state, unfinished, target, shards, weights, team, tokenizer)

    def wait(self) -> bool:
        """Until the last checkpoint is written; whether it was."""
        if self._writing is not None:
            self._writing.result()
        return self._newest_is_whole

    def _write(
        self,
        state: LearnerState,
        unfinished: Path,
        target: Path,
        shards: Future[Any],
        weights: dict[str, Tensor],
        team: Team,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        try:
            shards.result()
            write_model(unfinished / "model", team.own.policy.causal, weights, tokenizer=tokenizer)
            (unfinished / "state.msgpack").write_bytes(msgspec.msgpack.encode(state))
            _seal(unfinished)
            self._replace(target, unfinished)
        except Exception as error:  # noqa: BLE001 - a full disk says it in many ways, and whatever it is, training goes on
            self._failed(target, error)
            shutil.rmtree(unfinished, ignore_errors=True)
            return
        self._newest_is_whole = True
        for outdated in self._whole()[: -self._keep]:
            shutil.rmtree(outdated, ignore_errors=True)

    def _replace(self, target: Path, unfinished: Path) -> None:
        """Give a checkpoint its name; one that has it already is whole until then, and under another after."""
        aside = self.folder / f".replaced-{target.name}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        unfinished.rename(target)
        _flush(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _failed(self, target: Path, error: Exception) -> None:
        self._newest_is_whole = False
        self.num_failed += 1
        logger.error("checkpoint %s could not be written: %s; training goes on, free some disk", target, error)

    def load_newest(self) -> tuple[Path, LearnerState] | None:
        """The newest checkpoint whose checksums hold; None if there is none at all.

        Raises:
            CheckpointError: there are some, and none of them can be read.
        """
        for aside in self.folder.glob(".replaced-*"):  # it was to be replaced, and what should have come did not
            target = self.folder / aside.name.removeprefix(".replaced-")
            if not target.exists():
                aside.rename(target)
        whole = self._whole()
        for folder in reversed(whole):
            if not _holds(folder):
                logger.error("checkpoint %s is damaged; trying the one before", folder)
                continue
            return folder, read_state(folder)
        if whole:
            raise CheckpointError(f"{self.folder}: no checkpoint is whole; start anew without --resume")
        return None

    def _whole(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def read_state(folder: Path) -> LearnerState:
    """Of a checkpoint.

    Raises:
        CheckpointError: another version of this program wrote it; says which.
    """
    encoded = (folder / "state.msgpack").read_bytes()
    found = msgspec.msgpack.decode(encoded, type=_Format).format
    if found != _FORMAT:
        raise CheckpointError(
            f"{folder}: format {found}, this version reads {_FORMAT}; resume with the version that wrote it, "
            "or start anew without --resume"
        )
    return msgspec.msgpack.decode(encoded, type=LearnerState)


def _seal(folder: Path) -> None:
    """Flush every file to the disk and note its checksum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {str(path.relative_to(folder)): _digest(path) for path in files}
    (folder / "checksums.json").write_bytes(msgspec.json.encode(sums))
    for path in (*files, folder / "checksums.json", *(p for p in folder.iterdir() if p.is_dir()), folder):
        _flush(path)


def _holds(folder: Path) -> bool:
    try:
        sums = msgspec.json.decode((folder / "checksums.json").read_bytes(), type=dict[str, str])
        return all(_digest(folder / name) == digest for name, digest in sums.items())
    except (OSError, msgspec.DecodeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
