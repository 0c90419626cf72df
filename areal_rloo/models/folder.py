"""Check a model folder on disk without loading the model: missing files, truncated files, number of parameters.

Only the headers of weight files are read, so a launcher can check any model before it starts processes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_rloo.config import LoraConfig
from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError, ModelError, shown
from areal_rloo.files import open_regular, read_regular
from areal_rloo.models.sizes import Sizes

ADAPTER_DOWN, ADAPTER_UP = ".lora_A.weight", ".lora_B.weight"  # end the names of an adapter's tensors

_QUANTIZED = ("quantization_config", "compression_config")  # keys of config.json
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
IN_LAYER = re.compile(r"\.\d+\..*\.weight$")  # the weight of a linear layer of a decoder layer, if it is a matrix
_OF_LAYER = re.compile(r"(.*\.layers\.)(\d{1,4})(\..*\.(?:weight|bias))")  # a parameter of a decoder layer
_MOST_LAYERS = 10_000
_NARROW = ("F8_", "F6_", "F4")  # dtypes in safetensors headers whose numbers need scales
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # weights that torch.load reads
HEAD = "lm_head.weight"  # some files have a tied head, too
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_MOST_HEADER_BYTES = 100 * 10**6  # the limit of safetensors
_LFS_POINTER = b"version "  # of git-lfs; no header has this length


def check_model_folder(key: str, path: str, *, else_expected: str, files: str) -> Path | None:
    """Return the folder of a model if the config is readable; None for a hub name; raise ModelError otherwise.

    Args:
        key, path: a config key and the value, a folder or a hub name.
        else_expected, files: the values that the key takes and the expected kind of folder, in words for errors.
    """
    folder = Path(path)
    if not folder.exists():
        if is_hub_name(path):
            return None
        raise ModelError(f"{key}: {path}: no such folder; expected {else_expected}")
    try:
        json.loads(read_regular(folder / "config.json").decode())
    except (OSError, ValueError, RecursionError) as error:
        if (folder / "model" / "config.json").is_file():
            raise ModelError(f"{key}: {path}: this is a checkpoint; its model is {folder / 'model'}") from error
        raise ModelError(f"{key}: {path}: config.json cannot be read: {error}; expected {files}") from error
    return folder


def read_config(key: str, folder: Path) -> dict[str, Any]:
    """Read config.json; raises ModelError if this fails."""
    try:
        return from_json(read_regular(folder / "config.json"), dict[str, Any])
    except (OSError, DecodeError) as error:
        raise ModelError(
            f"{key}: {folder / 'config.json'} cannot be read: {error}; download the model again"
        ) from error


def check_precision(key: str, path: str, config: Mapping[str, Any]) -> None:
    """Refuse a quantized model: some loaders round masters without a word, the others fail late."""
    for section in (config, config.get("text_config")):
        for name in _QUANTIZED:
            given = section.get(name) if isinstance(section, Mapping) else None
            if given is not None:
                method = given.get("quant_method") if isinstance(given, Mapping) else None
                raise ModelError(_quantized(key, path, f"{name} in config.json: {shown(method or 'no method')}"))


def _quantized(key: str, path: str, found: str) -> str:
    return (
        f"{key}: {path} is quantized ({found}); training needs full-precision weights (bfloat16, float16 or float32); "
        "take the unquantized checkpoint, or dequantize this one first"
    )


def check_weights(key: str, folder: Path) -> dict[str, StoredTensor]:
    """Check that every weight file exists and is complete, and return the tensors as `stored_tensors` does.

    Raises a ModelError with the file and the remedy otherwise.

    Pickled weights and adapters are refused: loading a pickle can run code, and transformers loads the base model that
    an adapter names.
    """
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{key}: {folder}: adapter_config.json is that of an adapter; merge the adapter into its base model "
            "(merge_and_unload of peft, then save_pretrained), and name the folder of the merged model"
        )
    return stored_tensors(key, folder)


def check_targets(lora: LoraConfig, known: Collection[str]) -> None:
    """Raise ModelError if adapters go to layers that are not among the linear layers `known`."""
    unknown = sorted(set(lora.targets or ()) - set(known))
    if unknown or lora.targets == ():
        raise ModelError(
            f"learner.lora.targets: expected names of linear layers ({', '.join(sorted(known))}), got "
            f"{', '.join(map(shown, unknown)) or 'none'}; leave the key out for all of them"
        )


def linear_layers(folder: Path) -> set[str]:
    """Return the names of the linear layers in the decoder layers of a folder; raises ModelError as `check_weights`."""
    return {
        name.rsplit(".", 2)[-2]
        for name, tensor in stored_tensors("model.path", folder).items()
        if len(tensor.shape) == 2 and IN_LAYER.search(name)
    }


def check_policy_weights(key: str, folder: Path) -> dict[str, StoredTensor]:
    """Check the weights of a policy: like `check_weights`, real numbers, not quantized; raises ModelError likewise."""
    stored = check_weights(key, folder)
    check_precision(key, str(folder), read_config(key, folder))
    for name, tensor in stored.items():
        if tensor.dtype.startswith(_NARROW):
            raise ModelError(_quantized(key, str(folder), f"{name} in {tensor.file.name}: {shown(tensor.dtype)}"))
        if tensor.dtype.startswith("C"):
            raise ModelError(
                f"{key}: {folder} has {name} of complex numbers ({shown(tensor.dtype)}), expected real numbers: a load "
                "would drop the imaginary parts; take another model"
            )
    return stored


def check_layers(key: str, folder: Path, stored: Iterable[str]) -> None:
    """Raise ModelError if a decoder layer of config.json lacks a stored parameter that another layer has, by name."""
    number = read_config(key, folder).get("num_hidden_layers")
    found = [match for name in stored if (match := _OF_LAYER.fullmatch(name))]
    prefixes, ends = {match[1] for match in found}, {match[3] for match in found}
    if not isinstance(number, int) or len(prefixes) != 1 or number > _MOST_LAYERS:
        return
    has = {(int(match[2]), match[3]) for match in found}
    missing = next(((layer, end) for layer in range(number) for end in sorted(ends) if (layer, end) not in has), None)
    if missing is not None:
        name = f"{prefixes.pop()}{missing[0]}{missing[1]}"
        raise ModelError(
            f"{key}: {folder} has no weights for {name}, expected num_hidden_layers={number} equal layers; "
            "download the model again"
        )


def check_tokenizer(key: str, folder: Path) -> None:
    """Raise ModelError if the folder has no tokenizer file."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"{key}: {folder}: no tokenizer in it; copy tokenizer.json and tokenizer_config.json beside it"
        )


def num_parameters(folder: Path) -> int:
    """Count the parameters in the weight files of a folder, a tied head once; raises ModelError as `check_weights`."""
    stored, sizes = stored_tensors("model", folder), Sizes.of(read_config("model", folder))
    counted = sum(math.prod(tensor.shape) for tensor in stored.values())
    return counted - sizes.head if sizes is not None and sizes.tied and HEAD in stored else counted


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of weights, by the name in the file."""

    file: Path
    name: str
    dtype: str  # as in the header
    shape: tuple[int, ...]
    num_bytes: int
    stamp: tuple[int, int, int]  # of the file


def stamp_of(file: Path) -> tuple[int, int, int]:
    """Return numbers of a file that change when another file takes the place, or bytes are written."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def stored_tensors(key: str, folder: Path) -> dict[str, StoredTensor]:
    """List the tensors for a loader, by name: those of the index, otherwise those of model.safetensors.

    Other files may lie beside them: a second copy of the weights (consolidated.safetensors), adapters. Only headers are
    read. Raises ModelError if a file is missing or damaged.
    """
    tensors = {}
    for file in _weight_files(key, folder):
        stamp = stamp_of(file)
        for name, tensor in _header(key, file).items():
            first, end = tensor.data_offsets
            tensors[name] = StoredTensor(file, name, tensor.dtype, tensor.shape, end - first, stamp)
    return tensors


def is_hub_name(path: str) -> bool:
    """Return True if a path that is not a folder has the form of a hub name."""
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith(".")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the cache folder of huggingface_hub, from the same environment variables."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or f"{home}/hub").expanduser()


def cached_folder(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of a downloaded hub model; None if the model was never downloaded."""
    cached = hub_cache(environment) / f"models--{name.replace('/', '--')}"
    try:
        commit = read_regular(cached / "refs" / "main").decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = cached / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


class _Index(msgspec.Struct):
    """The index of a model in several files."""

    weight_map: dict[str, str]


def weight_files(index: Path) -> list[str]:
    """Read the names of the files of weights from model.safetensors.index.json.

    Raises:
        OSError: the index cannot be read.
        DecodeError: the index has another structure.
    """
    return sorted(set(from_json(read_regular(index), _Index).weight_map.values()))


def _weight_files(key: str, folder: Path) -> list[Path]:
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        pickled = next((path.name for path in sorted(folder.iterdir()) if path.suffix in _PICKLED), None)
        if not single.is_file() and pickled is not None:  # a pipe would hang
            raise ModelError(
                f"{key}: {folder}: {pickled} is a pickle, which can run code, and is not loaded; expected .safetensors "
                "files; if you trust the file, convert the model: from_pretrained and save_pretrained of transformers"
            )
        if not single.is_file():
            text = f"{key}: {folder}: no {SINGLE} in it and no {INDEX}; expected a Hugging Face model folder"
            raise ModelError(text, absent=True)
        return [single]
    try:
        names = weight_files(index)
        missing = [name for name in names if not (folder / name).is_file()]
    except (OSError, DecodeError) as error:
        raise ModelError(f"{key}: {index} cannot be read: {error}; download the model again") from error
    if missing:
        raise ModelError(
            f"{key}: {folder}: {len(missing)} of its {len(names)} files of weights are missing, the first is "
            f"{missing[0]}; download the model again"
        )
    if single.is_file() and SINGLE not in names:
        raise ModelError(
            f"{key}: {folder} has {SINGLE}, which transformers would load, and {INDEX} of other files, which servers "
            "would load; expected one of them; remove the other"
        )
    return [folder / name for name in names]


_Natural = Annotated[int, Meta(ge=0, le=2**53)]


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor in the header of a weight file."""

    dtype: str
    shape: Annotated[tuple[_Natural, ...], Meta(max_length=64)]
    data_offsets: tuple[_Natural, _Natural]


def _header(key: str, file: Path) -> dict[str, _Tensor]:
    """Read the tensors in the header of a weight file; refuse a file shorter than the header says."""
    try:
        with open_regular(file) as opened:
            head = opened.read(8)
            if head == _LFS_POINTER:
                raise ModelError(
                    f"{key}: {file} is a pointer of git-lfs, not the weights; run git lfs pull in its folder"
                )
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > _MOST_HEADER_BYTES:
                raise ValueError("the header is not that of a .safetensors file")
            entries = from_json(opened.read(length), dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        header = {name: from_json(bytes(entry), _Tensor, name=name) for name, entry in entries.items()}
        ends = [tensor.data_offsets[1] for tensor in header.values()]
        num_bytes, expected = file.stat().st_size, 8 + length + max(ends, default=0)
        if num_bytes < expected:
            raise ValueError(f"{num_bytes} of {expected} bytes are present")
    except (OSError, DecodeError, ValueError) as error:
        raise ModelError(f"{key}: {file} is not whole: {error}; download the model again") from error
    return header
