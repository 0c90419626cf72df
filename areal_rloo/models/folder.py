"""A model folder as it lies on the disk, looked at without loading it: what is missing, cut short, and how large it is.

Of a file of weights only its header is read, so that a launcher can look at any model before it starts anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.errors import ModelError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MOST_HEADER_BYTES = 100 * 10**6  # as safetensors itself has it
_LFS_POINTER = b"version "  # of git-lfs; no header has such a length


def check_model_folder(key: str, path: str, *, else_expected: str, files: str) -> Path | None:
    """The folder of a model, where its config can be read; None for a hub name.

    Args:
        key: where the path stands in the config, for errors.
        path: a folder or a hub name.
        else_expected: what the key takes, in words.
        files: what the folder was expected to be.

    Raises:
        ModelError: it is neither, or a folder of something else.
    """
    folder = Path(path)
    if not folder.exists():
        if is_hub_name(path):
            return None
        raise ModelError(f"{key}: {path}: no such folder; expected {else_expected}")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if (folder / "model" / "config.json").is_file():
            raise ModelError(f"{key}: {path}: this is a checkpoint; its model is {folder / 'model'}") from error
        raise ModelError(f"{key}: {path}: config.json cannot be read: {error}; expected {files}") from error
    return folder


def check_weights(key: str, folder: Path) -> None:
    """Every file of weights is there and whole.

    Raises:
        ModelError: one is not; says which, and how to get it.
    """
    for file in _weight_files(key, folder):
        _header(key, file)


def check_tokenizer(key: str, folder: Path) -> None:
    """There is a tokenizer in the folder.

    Raises:
        ModelError: there is none.
    """
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(f"{key}: {folder}: no tokenizer in it; copy {_TOKENIZERS[0]} and {_TOKENIZERS[1]} beside it")


def num_parameters(folder: Path) -> int:
    """Numbers in the weights of a folder.

    Raises:
        ModelError: as `check_weights`.
    """
    return sum(
        math.prod(tensor["shape"])
        for file in _weight_files("model", folder)
        for name, tensor in _header("model", file).items()
        if name != "__metadata__"
    )


def is_hub_name(path: str) -> bool:
    """Whether a path that is no folder may name a model of the hub."""
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith(".")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where the hub's files are kept, as its library finds it."""
    home = environment.get("HF_HOME") or str(
        Path(environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "huggingface"
    )
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home) / "hub").expanduser()


def cached_folder(name: str, environment: Mapping[str, str]) -> Path | None:
    """Where the files of a hub name lie; None where they were never downloaded."""
    cached = hub_cache(environment) / f"models--{name.replace('/', '--')}"
    try:
        commit = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = cached / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


def _weight_files(key: str, folder: Path) -> Iterator[Path]:
    index = folder / _INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelError(f"{key}: {folder}: no .safetensors file in it; expected a Hugging Face model folder")
        yield from found
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{key}: {index} cannot be read: {error}; download the model again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{key}: {folder}: {len(missing)} of its {len(names)} files of weights are missing, the first is "
            f"{missing[0]}; download the model again"
        )
    yield from (folder / name for name in names)


def _header(key: str, file: Path) -> dict[str, Any]:
    """What a file of weights says it holds; refuses one that holds less."""
    try:
        with file.open("rb") as opened:
            head = opened.read(8)
            if head == _LFS_POINTER:
                raise ModelError(
                    f"{key}: {file} is a pointer of git-lfs, not the weights; run git lfs pull in its folder"
                )
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > _MOST_HEADER_BYTES:
                raise ValueError("it does not begin as a .safetensors file does")
            header: dict[str, Any] = msgspec.json.decode(opened.read(length), type=dict[str, Any])
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        num_bytes, expected = file.stat().st_size, 8 + length + max(ends, default=0)
        if num_bytes < expected:
            raise ValueError(f"it has {num_bytes} of {expected} bytes")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{key}: {file} is not whole: {error}; download the model again") from error
    return header
