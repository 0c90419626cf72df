"""Tell whether a snapshot of a hub model in the cache is complete, without asking the hub.

A process takes a complete snapshot as it is. transformers would ask the hub for each optional file that a model does
not have, and try again for minutes if the hub cannot be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areal_rloo.errors import DecodeError
from areal_rloo.models.folder import INDEX, SINGLE, cached_folder, weight_files

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # everything but the weights


def complete_folder(name: str, environment: Mapping[str, str], *, weights: bool = True) -> Path | None:
    """Return the snapshot of a hub model if the cache has all its files, perhaps but the weights; None otherwise."""
    folder = cached_folder(name, environment)
    return None if folder is None or missing_files(folder, weights=weights) else folder


def missing_files(folder: Path, *, weights: bool = True) -> str:
    """Name in words the files that a snapshot with a config.json lacks; an empty string if it is complete.

    Weights of an index, or model.safetensors, and a tokenizer. A snapshot with all of them may lack optional files,
    such as generation_config.json, only if the download was stopped in an unusual order.
    """
    try:
        files = weight_files(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    except (OSError, DecodeError) as error:
        return f"{INDEX} cannot be read: {error}"
    missing = [file for file in files if not (folder / file).is_file()] if weights else []
    if missing:
        return f"{len(missing)} of its {len(files)} files of weights are missing, the first is {missing[0]}"
    return "" if _has_tokenizer(folder) else "no tokenizer in it"


def _has_tokenizer(folder: Path) -> bool:
    has = {path.name for path in folder.iterdir()}
    whole = bool(has & {"tokenizer.json", "vocab.txt"}) or has >= {"vocab.json", "merges.txt"}
    return whole or any(name.endswith(".model") for name in has)
