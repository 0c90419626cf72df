"""Weight files: read the facts of a model folder, and write weights to a private folder for the server."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from areal_rloo.errors import EngineError, ModelError
from areal_rloo.files import ScratchFolder, memory_folder, read_regular, remove_abandoned
from areal_rloo.models.folder import StoredTensor
from areal_rloo.models.stored import difference_of_shapes

_ROOM = 2.5  # times the model's files: new weights may have a wider dtype than the files


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the files of a model.

    Attributes:
        context_tokens: the model's longest context; None if the config does not tell.
    """

    vocab_size: int
    context_tokens: int | None


class _Sizes(msgspec.Struct):
    """The part of config.json that counts here."""

    vocab_size: Annotated[int, Meta(ge=1, le=2**31)]
    max_position_embeddings: Annotated[int, Meta(ge=1, le=2**53)] | None = None


def read_model(folder: Path) -> ModelFacts:
    """Read config.json.

    Raises:
        ModelError: config.json cannot be read or has no vocabulary size.
    """
    try:
        config = json.loads(read_regular(folder / "config.json"))  # may have NaN and Infinity
        config = config.get("text_config", config)
        sizes = msgspec.convert(config, _Sizes)
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ModelError(f"model.path: {folder} has no config.json with a vocab_size: {error!r}") from error
    return ModelFacts(sizes.vocab_size, sizes.max_position_embeddings)


def check_shapes(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse unknown and missing parameters: SGLang would skip unknown parameters and keep the missing ones.

    Raises:
        EngineError: a parameter is unknown, missing, or of another shape.
    """
    if (difference := difference_of_shapes(expected, given)) is not None:
        raise EngineError(difference)


class WeightsFolder:
    """An owner-only folder, in memory if there is room. The constructor removes folders of dead processes."""

    def __init__(self, parameters: Mapping[str, StoredTensor]) -> None:
        """`parameters`: of the server's model, by the names of the weights to write."""
        remove_abandoned()
        memory = memory_folder()
        roomy = shutil.disk_usage(memory).free > _ROOM * sum(tensor.num_bytes for tensor in parameters.values())
        self._scratch = ScratchFolder(memory if roomy else Path(tempfile.gettempdir()), "weights")
        self._shapes = {name: tensor.shape for name, tensor in parameters.items()}

    def write(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write a version; return the folder.

        Raises:
            EngineError: a parameter is unknown, missing, or of another shape; or the disk is full.
        """
        tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
        check_shapes(self._shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for former in self._scratch.path.glob("version-*"):  # of an update that failed before its load
            self.remove(former)
        folder = self._scratch.path / f"version-{policy_version}"
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
        self._scratch.close()
