"""Find the parameters of a model in the files of a folder, by the names under which transformers loads them.

In: a folder. Out: name, file and shape of each parameter; only headers are read. Some checkpoints have other names than
the module (`embed_out` of gpt_neox), or buffers of former versions; transformers itself renames and ignores.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from areal_rloo.errors import EngineError, ModelError
from areal_rloo.models.files import reading_model
from areal_rloo.models.folder import (
    ADAPTER_DOWN,
    ADAPTER_UP,
    HEAD,
    StoredTensor,
    check_weights,
    read_config,
    stamp_of,
)

_MOST_FILES = 16  # read at the same time
_OF_FILES = ("_name_or_path", "transformers_version")  # keys of config.json that say nothing of the model
_LOADING = threading.Lock()  # transformers keeps the state of a load in globals


def stored_parameters(key: str, folder: Path) -> dict[str, StoredTensor]:
    """Return the parameters by the names of transformers' model; tied parameters have the first of their names.

    transformers loads stand-ins for the tensors, views of a number each, and tells by their addresses where they went.
    This takes a tenth of a second and no memory, whatever the size of the model.

    Raises:
        ModelError: the folder is an adapter's, a file is damaged, a parameter has no tensor or another shape, a tensor
            belongs to no parameter, or a tied head has other values than the embedding.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415 - seconds, which some workers need not spend

    stored = check_weights(key, folder)
    numbers = {name: torch.zeros(()) for name in stored}
    names = {number.data_ptr(): name for name, number in numbers.items()}
    stand_ins = {name: number.expand(stored[name].shape) for name, number in numbers.items()}
    transformers_logging.disable_progress_bar()
    with _LOADING, reading_model(str(folder)):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, found = architecture.from_pretrained(
            None,
            trust_remote_code=False,
            config=config,
            state_dict=stand_ins,
            dtype=torch.float32,
            attn_implementation="eager",  # config.json may name one that is not installed here
            ignore_mismatched_sizes=True,  # named below
            output_loading_info=True,
        )
    for name, given, expected in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"{key}: {folder} has {name} of shape {list(given)}, expected {list(expected)} by config.json; download "
            "the model again"
        )
    if missing := found["missing_keys"]:
        raise ModelError(f"{key}: {folder} has no weights for {min(missing)}; download the model again")
    if unexpected := found["unexpected_keys"]:
        raise ModelError(
            f"{key}: {folder} has weights {min(unexpected)} ({len(unexpected)} such tensors), of which the "
            f"{config.model_type} model of transformers has no parameter; expected the weights of the model alone, "
            "because engines would hold them, and no update would change them; take another model, or remove them"
        )
    parameters = dict(model.named_parameters())
    unknown = [name for name, parameter in parameters.items() if parameter.data_ptr() not in names]
    if unknown:
        raise ModelError(
            f"{key}: {folder} has no tensor of {unknown[0]}, which transformers computes from others; save the model "
            "again with save_pretrained of transformers, or take another model"
        )
    named = {name: stored[names[parameter.data_ptr()]] for name, parameter in parameters.items()}
    _check_head(key, folder, stored.get(HEAD), named.values())
    return named


def _check_head(key: str, folder: Path, head: StoredTensor | None, parameters: Collection[StoredTensor]) -> None:
    """Raise ModelError for another head beside an embedding that config.json ties to the head: a load unties them.

    Compares some rows; a copy of the embedding is no other head.
    """
    if head is None or head in parameters:
        return
    embedding = next((tensor for tensor in parameters if tensor.shape == head.shape), None)
    if embedding is None:
        return
    rows = sorted({0, head.shape[0] // 2, head.shape[0] - 1})
    with safe_open(head.file, framework="pt") as one, safe_open(embedding.file, framework="pt") as other:
        if all(torch.equal(one.get_slice(HEAD)[row], other.get_slice(embedding.name)[row]) for row in rows):
            return
    raise ModelError(
        f"{key}: {folder} has {HEAD} beside {embedding.name} with other values, and tie_word_embeddings=true in "
        f"config.json; expected one of them; set tie_word_embeddings=false if the head is right, or remove {HEAD}"
    )


def read_parameters(parameters: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Read parameters from their files, with the dtypes of the files; opens each file once.

    Raises:
        ModelError: a file is not the one that `stored_parameters` found.
    """
    for file, stamp in sorted({(tensor.file, tensor.stamp) for tensor in parameters.values()}):
        if stamp != stamp_of(file):
            raise ModelError(
                f"model.path: {file} has changed since this process read it first; expected the same files during a "
                "run; put the first model back; then areal-rloo resume RUN_FOLDER"
            )
        with safe_open(file, framework="pt") as opened:
            for name, tensor in parameters.items():
                if tensor.file == file:
                    yield name, opened.get_tensor(tensor.name)


def merged(
    parameters: Mapping[str, StoredTensor], adapters: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Read parameters from their files and add adapters (`learner/adapters.py`), in float32, then round to the dtype.

    Raises:
        EngineError: an adapter is of no parameter.
        ModelError: as `read_parameters`.
    """
    layers = {name.removesuffix(ADAPTER_DOWN) for name in adapters if name.endswith(ADAPTER_DOWN)}
    if unknown := layers - {name.removesuffix(".weight") for name in parameters}:
        raise EngineError(f"adapters do not fit the model: unknown {sorted(unknown)[:3]}")
    for name, tensor in read_parameters(parameters):
        layer = name.removesuffix(".weight")
        if layer in layers:
            up, down = (adapters[layer + end].float() for end in (ADAPTER_UP, ADAPTER_DOWN))
            yield name, torch.addmm(tensor.float(), up, down).to(dtype)
        else:
            yield name, tensor.to(dtype)


def digest_of_files(folder: Path) -> str:
    """Return a digest of the weights and of config.json, whatever files hold the weights.

    It takes about a second for each 2 GB of the largest file.

    Raises:
        ModelError: the folder has no readable weights.
    """
    files: defaultdict[Path, list[StoredTensor]] = defaultdict(list)
    for tensor in check_weights("model.path", folder).values():
        files[tensor.file].append(tensor)
    config = {name: value for name, value in read_config("model.path", folder).items() if name not in _OF_FILES}
    digest = sha256(json.dumps(config, sort_keys=True).encode())
    with ThreadPoolExecutor(_MOST_FILES) as threads:  # hashing lets other threads run
        digests = dict(chain.from_iterable(threads.map(_digests, files, files.values())))
    for name in sorted(digests):
        digest.update(digests[name])
    return digest.hexdigest()[:32]


def _digests(file: Path, stored: Iterable[StoredTensor]) -> list[tuple[str, bytes]]:
    found = []
    with safe_open(file, framework="pt") as opened:
        for each in stored:
            tensor = opened.get_tensor(each.name)
            digest = sha256(repr((each.name, tensor.dtype, tensor.shape)).encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
            found.append((each.name, digest.digest()))
    return found


def check_base(expected: str, found: str, folder: Path) -> None:
    """Raise ModelError if a folder has another digest than the model with which the run began."""
    if found != expected:
        raise ModelError(
            f"model.path: {folder} has other weights, or another config.json, than the model with which this run "
            f"began (digest {expected}, got {found} on this host); copy the first model of the run there"
        )


def difference_of_shapes(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> str | None:
    """Name the first unknown or missing parameter, or the first of another shape; None if all are the same."""
    for name, shape in given.items():
        if name not in expected:
            return f"parameter {name}: the model has none of that name"
        if tuple(shape) != expected[name]:
            return f"parameter {name}: expected shape {expected[name]}, got {tuple(shape)}"
    missing = sorted(set(expected) - set(given))
    others = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
    return f"parameter {missing[0]} is missing{others}" if missing else None
