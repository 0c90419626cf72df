"""Fingerprints of a sample of a version's weights: equal fingerprints prove that an engine runs this version.

In: parameters by Hugging Face name, on the CPU. Out: a `Sample`. The learner takes the sample of the published bytes,
and an engine compares it with the parameters that the engine holds. Pure functions, on any thread.

A sample is a decoder layer, or all parameters outside of the layers. Version v takes the sample v modulo their number,
so consecutive versions cover the model. Engines hold query, key and value as a single parameter, and gate and up, so
these share a fingerprint. Each rank of a tensor-parallel engine holds a part of a parameter, with a digest of its own.
`compared_share` tells how much of a model the fingerprints cover.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

Digest = Literal["sha256", "tiles"]
"""`sha256`: the first 8 bytes of SHA-256. `tiles`: a position-dependent sum of words, fast on a GPU (`_tiles`)."""

_LAYER = re.compile(r"\.layers\.\d+\.")
_PROJECTION = re.compile(r"(?<=\.)(q|k|v|gate|up)_proj(?=\.)")
_JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_proj", "up_proj")),
}
_SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
_WHOLE_BIASES = ("o_proj.bias", "down_proj.bias")  # of layers split by columns
_SPLIT_BY_ROWS = ("gate_proj", "up_proj")
_HEAD_BIAS = "lm_head.bias"
_VOCABULARY_ROWS = 64  # engines pad the vocabulary to a multiple

_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) % 2**32)
_FACTORS = (0x27D4EB2D, 0x165667B1)
_TURNS = (15, 13)
_TILE_WORDS = 8192
_CHUNK_WORDS = 32 * _TILE_WORDS  # fits a cache of the CPU


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """The digests of parameters that an engine holds as one: by rank, of the rows of each name, one after the other."""

    names: tuple[str, ...]
    parts: tuple[int, ...]


class Sample(msgspec.Struct, frozen=True):
    """The fingerprints of some parameters of a version."""

    digest: Digest
    fingerprints: tuple[Fingerprint, ...]


def place_of(name: str) -> str:
    """Return the part of a parameter's name that all parameters of its layer share; outside of layers the name."""
    found = _LAYER.search(name)
    return name if found is None else found.group()


def sampled_names(names: Iterable[str], policy_version: int) -> list[str]:
    """Return the parameters in the sample of this version, in the given order."""
    places = {name: place_of(name) for name in names}
    layers = list(dict.fromkeys(place for name, place in places.items() if place != name))
    index = policy_version % (len(layers) + 1)
    outside = index == len(layers)
    return [name for name, place in places.items() if (place == name if outside else place == layers[index])]


def known_names(names: Iterable[str]) -> list[str]:
    """Return a layer's parameters and those outside of the layers: every kind of a model's parameters."""
    given = list(names)
    layers = {place for name in given if (place := place_of(name)) != name}
    return [*sampled_names(given, 0), *(sampled_names(given, len(layers)) if layers else ())]


def compared_share(shapes: Mapping[str, Sequence[int]], *, num_ranks: int) -> float:
    """Return the share of a model's numbers that fingerprints cover; `shapes` are of all parameters, by name."""
    sizes = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    compared = (names for names in _joined(list(sizes)) if _parts(names, [sizes[name] for name in names], num_ranks))
    return sum(sizes[name].numel() for names in compared for name in names) / sum(map(torch.numel, sizes.values()))


def take_sample(sampled: Mapping[str, Tensor], *, digest: Digest, num_ranks: int) -> Sample:
    """Take the fingerprints of a version's sample.

    Args:
        sampled: the parameters of `sampled_names`, each with the dtype that the engine holds, on the CPU.
        digest: of the engine's device.
        num_ranks: of a tensor-parallel engine.
    """
    fingerprints = []
    for joined in _joined(list(sampled)):
        parts = _parts(joined, [sampled[name] for name in joined], num_ranks)
        if parts:
            fingerprints.append(Fingerprint(joined, tuple(digest_of(part, digest) for part in parts)))
    return Sample(digest, tuple(fingerprints))


def digest_of(tensors: Sequence[Tensor], digest: Digest) -> int:
    """Compute 64 bits from the bytes of tensors, one tensor after the other."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors]
    if digest == "tiles":
        return _tiles(np.concatenate(flat) if len(flat) > 1 else flat[0])
    hasher = hashlib.sha256()
    for part in flat:
        hasher.update(part.data)
    return int.from_bytes(hasher.digest()[:8], "big")


def _joined(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Group the names of parameters that engines hold as one; not all families have every projection."""
    groups, known = [], set(names)
    for name in names:
        member = _PROJECTION.search(name)
        others = () if member is None else _JOINED[member.group()]
        joined = tuple(other for each in others if (other := _PROJECTION.sub(each, name)) in known)
        groups.append(joined or (name,))
    return list(dict.fromkeys(groups))


def _parts(names: tuple[str, ...], tensors: Sequence[Tensor], num_ranks: int) -> list[list[Tensor]]:
    """Return the tensors that each rank holds; none if ranks may hold them in another way than these rules say."""
    name, first = names[0], tensors[0]
    if place_of(name) == name and (first.ndim > 1 or name.endswith(_HEAD_BIAS)):  # rows of the vocabulary
        return [list(tensors)] if num_ranks == 1 and len(first) % _VOCABULARY_ROWS == 0 else []
    if num_ranks == 1:
        return [list(tensors)]
    if name.endswith(_SPLIT_BY_COLUMNS):
        return [[part] for part in first.chunk(num_ranks, dim=1)]
    if name.split(".")[-2] in _SPLIT_BY_ROWS:
        return [list(part) for part in zip(*(tensor.chunk(num_ranks) for tensor in tensors), strict=True)]
    # Ranks share key and value heads if there are fewer heads than ranks.
    return [list(tensors)] * num_ranks if "norm" in name or name.endswith(_WHOLE_BIASES) else []


def _tiles(data: np.ndarray) -> int:
    """Compute SGLang's digest of a tensor on a GPU, from its bytes ([num_bytes] uint8)."""
    words = (np.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data).view(np.uint32)
    total = 0
    for start in range(0, len(words), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        index = np.arange(start, start + len(chunk), dtype=np.uint32)
        sums = [_tile_sums(chunk, index, *which) for which in zip(_SEEDS, _FACTORS, _TURNS, strict=True)]
        high, low = (_mixed(each ^ np.uint32(4 * len(words) % 2**32)).astype(np.uint64) for each in sums)
        total += int((high << np.uint64(32) | low).sum(dtype=np.uint64))
    return _splitmix64(total % 2**64) if len(words) else 0


def _tile_sums(words: np.ndarray, index: np.ndarray, seed: int, factor: int, turn: int) -> np.ndarray:
    """Mix each word with its index, and add the words of each tile; [num_words] to [num_tiles] uint32."""
    turned = index << np.uint32(turn) | index >> np.uint32(32 - turn)
    mixed = _mixed(words ^ (index * np.uint32(factor) + np.uint32(seed)) ^ turned)
    sums: np.ndarray = np.add.reduceat(mixed, np.arange(0, len(words), _TILE_WORDS), dtype=np.uint32)
    return sums


def _mixed(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of MurmurHash3 to 32-bit words."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        values = (values ^ values >> np.uint32(shift)) * np.uint32(factor)
    final: np.ndarray = values ^ values >> np.uint32(16)
    return final


def _splitmix64(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31
