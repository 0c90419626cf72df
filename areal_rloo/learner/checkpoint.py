"""Write and read checkpoints: the full state of a learner, complete or absent.

    checkpoints/step-000025/    shards/ (weights, optimizer and random states, of all ranks)   state.msgpack
                                model/ (Hugging Face format)   adapters/ (with LoRA, peft format)
                                config.yaml   checksums.json

A checkpoint is written into a hidden folder, flushed to disk, and renamed (`checkpoint_folder` has all names).
Ledger, prompt stream, buffered trajectories and partial rollouts are included, so no prompt is skipped or trained
twice, and unfinished samples go on. Any number of ranks can read the shards. The training thread copies the state; a
writer thread writes the files.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
from huggingface_hub import save_torch_state_dict
from msgspec import Meta
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_rloo.config import Config, dump_config
from areal_rloo.config.reading import parse
from areal_rloo.decoding import from_json, from_msgpack
from areal_rloo.errors import CheckpointError, ConfigError, DecodeError, ModelError
from areal_rloo.files import flush_to_disk, open_regular, use_umask
from areal_rloo.intake.ledger import Ledger, by_sample
from areal_rloo.intake.prompts import PromptStream, PromptStreamState
from areal_rloo.intake.saved_ledger import LedgerState, ledger_of, ledger_state
from areal_rloo.learner.adapters import merge, write_adapters
from areal_rloo.learner.checkpoint_folder import (
    UNWRITTEN,
    checkpoint_path,
    finish,
    list_checkpoints,
    prune,
    recover,
    set_aside,
    unfinished_path,
    version_of,
)
from areal_rloo.learner.parallel.files import opened_shards, shard_files
from areal_rloo.learner.stretches import CONFIG_NAME, STATE_NAME
from areal_rloo.learner.team import Team
from areal_rloo.models.folder import check_weights
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.columns import Limits, TrajectoryHeader, decode_columns, encode_columns
from areal_rloo.wire.messages import Count, History, Version
from areal_rloo.wire.turns import decode_turns

logger = get_logger(__name__)

_FORMAT = 9
_SUMS, _SHARDS, _MODEL, _ADAPTERS = "checksums.json", "shards", "model", "adapters"
_FILE_BYTES = 5 * 10**9  # of a safetensors file; larger models are split into several files with an index
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
    columns: tuple[bytes, ...]
    stream: PromptStreamState
    totals: Totals
    kl_coefficient: Annotated[float, Meta(ge=0, le=1e300)]
    num_optimizer_steps: Count


def capture(ledger: Ledger, stream: PromptStream) -> dict[str, Any]:
    """Capture the current state; call while ledger and stream do not change."""
    buffered = [t for g in ledger.groups.values() for s in g.samples.values() for t in s.trajectories]
    headers, columns = encode_columns(buffered)
    encoded = {"headers": headers, "columns": tuple(bytes(column) for column in columns)}
    return {"format": _FORMAT, "ledger": ledger_state(ledger), "stream": stream.state(), **encoded}


def restore_ledger(state: LearnerState, stream: PromptStream) -> Ledger:
    """Restore ledger and stream from a checkpoint; samples that were in flight wait to be leased again."""
    stream.restore(state.stream)
    prompts = {group.group_id: stream.prompt(group.epoch, group.item_index) for group in state.ledger.groups}
    return ledger_of(state.ledger, prompts, by_sample(_trajectories(state)))


class Checkpoints:
    """The checkpoints of a run. A thread writes a single checkpoint at a time while training continues.

    Call `begin` or `load_newest` before the first `save`, while no other learner uses the folder.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder  # contains all checkpoints
        self.num_failed = 0  # failed writes since this process started
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._newest_is_whole = True

    def save(self, state: LearnerState, *, config: Config, team: Team, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy the current state and start writing; first wait for the previous write. Later delete all but `keep`.

        If memory has no room for the copy, return when the checkpoint is written. If writing fails, the failure is
        logged and counted, and training continues.
        """
        self.wait()
        target = checkpoint_path(self.folder, state.policy_version)
        unfinished = unfinished_path(target)
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / _SHARDS).mkdir(parents=True)
        except OSError as error:
            self._failed(target, error)
            return
        shards = team.save_shards(unfinished / _SHARDS)
        weights, are_live = team.weights_to_write()

        def write() -> None:
            try:
                shards.result()
                if (lora := config.learner.lora) is not None:
                    path = config.model.path
                    base = str(team.own.policy.causal.name_or_path) if path == "tiny" else path
                    write_adapters(unfinished / _ADAPTERS, merge(weights), lora, base=base)
                write_model(unfinished / _MODEL, team.own.policy.causal, weights, tokenizer=tokenizer)
                (unfinished / STATE_NAME).write_bytes(msgspec.msgpack.encode(state))
                (unfinished / CONFIG_NAME).write_text(dump_config(config), encoding="utf-8")
                _seal(unfinished)
                finish(target)
            except Exception as error:  # noqa: BLE001 - a full disk raises many classes; training continues after any
                self._failed(target, error)
                shutil.rmtree(unfinished, ignore_errors=True)
                return
            self._newest_is_whole = True
            prune(target, keep=self._keep)

        self._writing = self._writer.submit(write)
        if are_live:
            self.wait()

    def wait(self) -> bool:
        """Wait for the last write; return True if the write succeeded."""
        if self._writing is not None:
            self._writing.result()
        return self._newest_is_whole

    def _failed(self, target: Path, error: Exception) -> None:
        self._newest_is_whole = False
        self.num_failed += 1
        logger.error("checkpoint %s %s: %s; training continues, free some disk", target, UNWRITTEN, error)

    def begin(self) -> None:
        """Set aside the checkpoints of an earlier run: the first checkpoint of this run begins another history."""
        recover(self.folder)
        for path in list_checkpoints(self.folder).values():
            set_aside(path)

    def load_newest(self) -> tuple[Path, LearnerState] | None:
        """Load the newest undamaged checkpoint; None without any checkpoint.

        Sets aside the damaged checkpoints of later versions: the run leaves their history.

        Raises:
            CheckpointError: all checkpoints are damaged, or the newest undamaged checkpoint has another format.
        """
        recover(self.folder)
        damaged: list[Path] = []
        for path in reversed(list_checkpoints(self.folder).values()):
            try:
                state = read_checkpoint(path)
            except DecodeError as error:
                logger.error("checkpoint %s is damaged: %s; trying the previous checkpoint", path, error)
                damaged.append(path)
                continue
            for later in damaged:
                set_aside(later)
            return path, state
        if damaged:
            raise CheckpointError(
                f"{damaged[0].parent}: every checkpoint is damaged; start again with another run.folder"
            )
        return None


def read_checkpoint(folder: Path) -> LearnerState:
    """Check every file of a checkpoint and read the state.

    The checksums find accidents. They have no key: a file that was changed on purpose may have a correct checksum, so
    the readers of all files check the content, and no reader can run code.

    Raises:
        DecodeError: a file is missing or damaged; names the file.
        CheckpointError: the checkpoint has another format.
    """
    try:
        _check_sums(folder)
        state = read_state(folder)
        if state.policy_version != version_of(folder):
            raise DecodeError(f"{STATE_NAME} has the state of version {state.policy_version}")
        with opened_shards(folder / _SHARDS):
            pass  # their headers are in order
        check_weights(_MODEL, folder / _MODEL)
        parse(_text(folder, CONFIG_NAME), CONFIG_NAME, is_file=True)
    except (OSError, ModelError, ConfigError) as error:
        raise DecodeError(str(error)) from error
    return state


def is_whole(folder: Path) -> bool:
    """Return True if no file of a checkpoint is missing or damaged; raises CheckpointError as `read_checkpoint`."""
    try:
        read_checkpoint(folder)
    except DecodeError:
        return False
    return True


def read_state(folder: Path) -> LearnerState:
    """Read the state file of a checkpoint.

    Raises:
        DecodeError: the file is damaged, or no ledger has this state.
        CheckpointError: the checkpoint has another format.
    """
    encoded = _content(folder, STATE_NAME)
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
    trajectories, _ = decode_columns(state.headers, state.columns, Limits(max_trajectories=len(state.headers)))
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


def write_model(
    folder: Path, causal: PreTrainedModel, weights: dict[str, Tensor], *, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a Hugging Face model folder, which `from_pretrained` and every engine load.

    `weights` are by Hugging Face name, in CPU memory. Only the configs of `causal` are read.
    """
    folder.mkdir(parents=True)
    dtype = next(iter(weights.values())).dtype
    config = type(causal.config).from_dict({**causal.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")})
    config.architectures = [type(causal).__name__]
    config.save_pretrained(folder)
    if causal.generation_config is not None:
        causal.generation_config.to_json_file(folder / "generation_config.json")  # save_pretrained validates
    tokenizer.save_pretrained(folder)
    save_torch_state_dict(weights, folder, max_shard_size=_FILE_BYTES)
    for path in folder.glob("*.safetensors"):
        use_umask(path)


def _seal(folder: Path) -> None:
    """Write the checksums of all files, and flush everything to disk."""
    files = [folder / name for name in sorted(_files(folder))]
    sums = {str(path.relative_to(folder)): _digest(path) for path in files}
    (folder / _SUMS).write_bytes(msgspec.json.encode(sums))
    for path in (*files, folder / _SUMS, *(p for p in folder.iterdir() if p.is_dir()), folder):
        flush_to_disk(path)


def _check_sums(folder: Path) -> None:
    """Compare the files of a checkpoint with their checksums. Other files may lie beside them; nothing reads those.

    Raises:
        DecodeError: names a file that is missing, or has another checksum or none.
    """
    sums, files = from_json(_content(folder, _SUMS), dict[str, str], name=_SUMS), _files(folder)
    shards = (f"{_SHARDS}/{path.name}" for path in shard_files(folder / _SHARDS))
    for name in (*sums, STATE_NAME, CONFIG_NAME, f"{_MODEL}/config.json", *shards):
        if name not in files:
            raise DecodeError(f"{name} is missing")
        if name not in sums:
            raise DecodeError(f"{_SUMS}: expected a checksum of {name}")
    for name, expected in sums.items():
        if _digest(folder / name) != expected:
            raise DecodeError(f"{name} has another checksum")


def _files(folder: Path) -> set[str]:
    """Give the names of all files except the checksums; a pipe or a device is no file."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in paths} - {_SUMS}


def _content(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise DecodeError(f"{name} is missing")
    with open_regular(path) as file:
        return file.read()


def _text(folder: Path, name: str) -> str:
    try:
        return _content(folder, name).decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"{name}: {error}") from error


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
