"""Files of weights: what the model's folder says about itself, and a private folder that weights are loaded through."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_rloo.errors import EngineError, ModelError

_PREFIX = "areal_rloo-weights-"
_LOCK = "lock"
_MEMORY = Path("/dev/shm")
_ROOM = 2.5  # times the model's files: weights may come in a wider dtype than they are stored in
_HEAD = "lm_head.weight"  # stored by some although it is the embedding


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a model say.

    Attributes:
        vocab_size: token ids are below it.
        context_tokens: the longest context it was made for; None where it does not say.
        shapes: of its parameters, by name; empty where the weights are not safetensors.
        num_bytes: of its weights.
    """

    vocab_size: int
    context_tokens: int | None
    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: int


def read_model(folder: Path) -> ModelFacts:
    """Read config.json and the headers of the weights.

    Raises:
        ModelError: config.json cannot be read or says no vocabulary size.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        vocab_size = int(config["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: {folder} has no config.json with a vocab_size: {error!r}") from error
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="np") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return ModelFacts(
        vocab_size, config.get("max_position_embeddings"), shapes, sum(file.stat().st_size for file in files)
    )


def check_shapes(facts: ModelFacts, given: Mapping[str, tuple[int, ...]]) -> None:
    """SGLang skips parameters it does not know and keeps those that are missing; we refuse them.

    Raises:
        EngineError: a parameter is unknown, missing, or of another shape.
    """
    if not facts.shapes:
        return
    for name, shape in given.items():
        if name not in facts.shapes:
            raise EngineError(f"parameter {name}: the model has none of that name")
        if tuple(shape) != facts.shapes[name]:
            raise EngineError(f"parameter {name}: expected shape {facts.shapes[name]}, got {tuple(shape)}")
    missing = sorted(set(facts.shapes) - set(given) - {_HEAD})
    if missing:
        raise EngineError(f"parameter {missing[0]} is missing, and {len(missing) - 1} others")


class WeightsFolder:
    """An owner-only folder, in memory where it has room. Those of processes that are gone are removed on the way."""

    def __init__(self, facts: ModelFacts) -> None:
        roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM * facts.num_bytes
        parent = _MEMORY if roomy else Path(tempfile.gettempdir())
        for place in {_MEMORY, parent}:
            _remove_abandoned(place)
        self._path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # owner-only
        self._lock = (self._path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # until this process is gone, however it ends
        self._facts = facts

    def write(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write a version; gives the folder that `remove` takes.

        Raises:
            EngineError: a parameter is unknown, missing, or of another shape; or there is no room.
        """
        tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
        check_shapes(self._facts, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for former in self._path.glob("version-*"):  # of an update that never began to load
            self.remove(former)
        folder = self._path / f"version-{policy_version}"
        folder.mkdir(mode=0o700)
        try:
            save_file(tensors, folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            self.remove(folder)
            raise EngineError(f"version {policy_version} cannot be written to {folder}: {error}") from error
        return folder

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Folders that nobody holds the lock of; those of other users are left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # not ours, held by its process, or gone already
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
