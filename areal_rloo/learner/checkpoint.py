"""Checkpoints: everything a learner needs to go on, whole or not at all.

    checkpoints/step-000025/    model/ (Hugging Face format)   reference/ (where it is refreshed)   optimizer.pt
                                state.msgpack   checksums.json

Written into a hidden folder, flushed to disk, and renamed; a folder with that name is whole. Ledger, prompt stream and
buffered trajectories are in it, so no prompt is skipped or trained on twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_rloo.errors import CheckpointError
from areal_rloo.learner.ledger import Ledger, LedgerState, by_sample
from areal_rloo.learner.prompts import PromptStream, PromptStreamState
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.wire.columns import Limits, TrajectoryHeader, decode_columns, encode_columns

logger = get_logger(__name__)

_FORMAT = 3


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


def capture(
    ledger: Ledger, stream: PromptStream, *, policy_version: int, seed: int, totals: Totals, kl_coefficient: float
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
    )


def restore_ledger(state: LearnerState, stream: PromptStream) -> Ledger:
    """The ledger of a checkpoint; what was in flight waits to be leased again. The stream is set back too."""
    stream.restore(state.stream)
    decoded = decode_columns(state.headers, state.columns, Limits(max_trajectories=len(state.headers)))
    trajectories = by_sample(decoded)
    prompts = {group.group_id: stream.prompt(group.epoch, group.item_index) for group in state.ledger.groups}
    return Ledger.restored(state.ledger, prompts, trajectories)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(
        self,
        state: LearnerState,
        *,
        model: PreTrainedModel,
        reference: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: dict[str, Any],
    ) -> Path | None:
        """Write a checkpoint and drop the oldest beyond `keep`; None, with an alarm in the log, if the disk refuses.

        `reference` is given where the run changes it.
        """
        target = self._folder / f"step-{state.policy_version:06d}"
        unfinished = self._folder / f".unfinished-{state.policy_version:06d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            model.save_pretrained(unfinished / "model")
            tokenizer.save_pretrained(unfinished / "model")
            if reference is not None:
                reference.save_pretrained(unfinished / "reference")
            torch.save(optimizer, unfinished / "optimizer.pt")
            (unfinished / "state.msgpack").write_bytes(msgspec.msgpack.encode(state))
            _seal(unfinished)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
            _flush(self._folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as torch and safetensors say it
            logger.error("checkpoint %s could not be written: %s; training goes on, free some disk", target, error)
            shutil.rmtree(unfinished, ignore_errors=True)
            return None
        for outdated in self._whole()[: -self._keep]:
            shutil.rmtree(outdated, ignore_errors=True)
        return target

    def load_newest(self) -> tuple[Path, LearnerState] | None:
        """The newest checkpoint whose checksums hold; None if there is none at all.

        Raises:
            CheckpointError: there are some, and none of them can be read.
        """
        whole = self._whole()
        for folder in reversed(whole):
            if not _holds(folder):
                logger.error("checkpoint %s is damaged; trying the one before", folder)
                continue
            encoded = (folder / "state.msgpack").read_bytes()
            found = msgspec.msgpack.decode(encoded, type=_Format).format
            if found != _FORMAT:
                raise CheckpointError(
                    f"{folder}: format {found}, this version reads {_FORMAT}; resume with the version that wrote it, "
                    "or start anew without --resume"
                )
            return folder, msgspec.msgpack.decode(encoded, type=LearnerState)
        if whole:
            raise CheckpointError(f"{self._folder}: no checkpoint is whole; start anew without --resume")
        return None

    def _whole(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))


def load_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's state, on the CPU."""
    state: dict[str, Any] = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    return state


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
