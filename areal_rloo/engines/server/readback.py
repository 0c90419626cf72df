"""Compare digests of a server's parameters with the sample of a version; SGLang and vLLM name parameters alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from areal_rloo.models.fingerprint import Digest, Fingerprint, Sample, sampled_names, take_sample

_JOINED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_HEAD = "lm_head.weight"  # not on a server that ties the embeddings


def sample_of_folder(folder: Path, *, dtype: str, digest: Digest, num_ranks: int) -> tuple[Sample, list[str]]:
    """Take the sample of version 0 from the files of a model; return the sample, and all names.

    Both are empty if the weights are not safetensors.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
        held = getattr(torch, dtype)
        sampled = {name: file_of[name].get_tensor(name).to(held) for name in sampled_names(sorted(file_of), 0)}
        return take_sample(sampled, digest=digest, num_ranks=num_ranks), list(file_of)


def difference_of(sample: Sample, ranks: object) -> str | None:
    """Return the first difference with the name and both values; `ranks` are a server's digests by its own names."""
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return f"expected the digests of each rank, got {ranks!r:.300}"
    differences = (_difference(expected, ranks) for expected in sample.fingerprints)
    return next((difference for difference in differences if difference is not None), None)


def _difference(expected: Fingerprint, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    name = server_name(expected.names)
    if name == _HEAD and not any(name in rank for rank in ranks):
        return None
    found: list[Any] = [rank.get(name, "no such parameter") for rank in ranks]
    digests = [f"{part:016x}" for part in expected.parts]
    if found == digests:
        return None
    return f"{name}: expected {', '.join(digests)}, found {', '.join(map(str, found)):.300}"


def server_name(names: tuple[str, ...]) -> str:
    """Return the server's name of parameters that the server holds as one."""
    if len(names) == 1:
        return names[0]
    member = next(member for member in _JOINED if f".{member}." in names[0])
    return names[0].replace(member, _JOINED[member])
