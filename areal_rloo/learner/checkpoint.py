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
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_rloo.config import Config, dump_config
from areal_rloo.config.reading import parse
from areal_rloo.decoding import from_json
from areal_rloo.errors import CheckpointError, ConfigError, DecodeError, ModelError, is_shortage
from areal_rloo.files import flush_to_disk, open_regular, use_umask
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
from areal_rloo.learner.state import LearnerState, decode_state
from areal_rloo.learner.stretches import CONFIG_NAME, STATE_NAME
from areal_rloo.learner.team import Team
from areal_rloo.models.folder import check_weights
from areal_rloo.telemetry.logs import TOLD, get_logger
from areal_rloo.telemetry.records import EvalRecord

logger = get_logger(__name__)

_SUMS, _SHARDS, _MODEL, _ADAPTERS = "checksums.json", "shards", "model", "adapters"
_FILE_BYTES = 5 * 10**9  # of a safetensors file; larger models are split into several files with an index


class Checkpoints:
    """The checkpoints of a run. A thread writes a single checkpoint at a time while training continues.

    Call `begin` or `load_newest` before the first `save`, while no other learner uses the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # contains all checkpoints
        self.num_failed = 0  # failed writes since this process started
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._newest_is_whole = True

    def save(
        self,
        state: LearnerState,
        config: Config,
        team: Team,
        tokenizer: PreTrainedTokenizerBase,
        evaluations: Callable[[], Sequence[EvalRecord]] = tuple,
    ) -> None:
        """Copy the current state and start writing; first wait for the previous write. Later prune old checkpoints.

        If memory has no room for the copy, return when the checkpoint is written. If writing fails, the failure is
        logged and counted, and training continues. `evaluations` gives those to compare, when the checkpoint is
        written.
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
            spared = worth_keeping(list_checkpoints(self.folder), evaluations(), config)
            prune(target, keep=config.checkpoint.keep, spared=spared)

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
        damaged: dict[Path, str] = {}
        for path in reversed(list_checkpoints(self.folder).values()):
            try:
                state = read_checkpoint(path)
            except DecodeError as error:
                damaged[path] = f"{path.name} is damaged: {error}"
                continue
            _say_resumed(state.policy_version, damaged)
            for later in damaged:
                set_aside(later)
            return path, state
        if damaged:
            raise CheckpointError(
                f"{self.folder}: every checkpoint is damaged; start again with another run.folder "
                f"({'; '.join(damaged.values())})"
            )
        return None


def worth_keeping(versions: Collection[int], evaluations: Iterable[EvalRecord], config: Config) -> set[int]:
    """Return the versions to keep, however old.

    The best has the highest reward, as a mean over the evaluation sets of the config; the newest of equals. Versions
    without an evaluation on every set are not compared.
    """
    every, rewards = config.checkpoint.keep_every_n_steps, defaultdict[int, dict[str, float]](dict)
    sets = {source.label for source in config.data.eval_sources}
    kept = {version for version in versions if every > 0 and version % every == 0}
    for record in evaluations:
        if record.policy_version in versions and record.name in sets and math.isfinite(record.reward):
            rewards[record.policy_version][record.name] = record.reward
    whole = [(fmean(by_set.values()), version) for version, by_set in rewards.items() if by_set.keys() == sets]
    return kept | {max(whole)[1]} if whole and config.checkpoint.keep_best else kept


def _say_resumed(version: int, damaged: Mapping[Path, str]) -> None:
    """Log the version of the loaded checkpoint; the launcher repeats this line for the user."""
    if not damaged:
        logger.log(TOLD, "resume: from step %d", version)
        return
    num_lost = max(version_of(path) or 0 for path in damaged) - version
    text = "resume: from step %d (steps lost: %d), because %s"
    logger.log(TOLD, text, version, num_lost, "; ".join(damaged.values()))


def read_checkpoint(folder: Path) -> LearnerState:
    """Check every file of a checkpoint and read the state.

    The checksums find accidents. They have no key: a file that was changed on purpose may have a correct checksum, so
    the readers of all files check the content, and no reader can run code.

    Raises:
        DecodeError: a file is missing or damaged; names the file.
        CheckpointError: the checkpoint has another format, or the machine could not read it now: that is no damage.
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
    except (OSError, ModelError, ConfigError, DecodeError) as error:
        if is_shortage(error):
            raise CheckpointError(f"{folder}: cannot be read now: {error}; resume again") from error
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
    return decode_state(_content(folder, STATE_NAME), folder)


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
