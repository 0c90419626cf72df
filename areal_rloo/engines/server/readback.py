"""Compare digests of a server's parameters with the sample of a version; SGLang and vLLM name parameters alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal_rloo.models.fingerprint import Digest, Fingerprint, Sample, known_names, take_sample
from areal_rloo.models.folder import StoredTensor
from areal_rloo.models.stored import read_parameters

_JOINED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_BASES = ("gpt_neox.",)  # of the names of some families; servers call the base `model`


def sample_of_files(stored: Mapping[str, StoredTensor], *, dtype: str, digest: Digest, num_ranks: int) -> Sample:
    """Take the sample of a layer, and of all parameters outside of the layers, from the files of a model."""
    known = {name: stored[name] for name in known_names(stored)}
    sampled = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read_parameters(known)}
    return take_sample(sampled, digest=digest, num_ranks=num_ranks)


def difference_of(sample: Sample, ranks: object) -> str | None:
    """Return the first difference with the name and both values; `ranks` are a server's digests by its own names."""
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return f"expected the digests of each rank, got {ranks!r:.300}"
    differences = (_difference(expected, ranks) for expected in sample.fingerprints)
    return next((difference for difference in differences if difference is not None), None)


def _difference(expected: Fingerprint, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    name = server_name(expected.names)
    found: list[Any] = [rank.get(name, "no such parameter") for rank in ranks]
    digests = [f"{part:016x}" for part in expected.parts]
    if found == digests:
        return None
    return f"{name}: expected {', '.join(digests)}, found {', '.join(map(str, found)):.300}"


def server_name(names: tuple[str, ...]) -> str:
    """Return the server's name of parameters that the server holds as one."""
    base = next((base for base in _BASES if names[0].startswith(base)), None)
    first = names[0] if base is None else names[0].replace(base, "model.", 1)
    if len(names) == 1:
        return first
    member = next(member for member in _JOINED if f".{member}." in first)
    return first.replace(member, _JOINED[member])
