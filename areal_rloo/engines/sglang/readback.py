"""Read a sample of the parameters back from the server, and compare the sample with the published weights.

POST /weights_checker gives a digest of each parameter on each rank, under SGLang's names. `skip_tensor_list` leaves out
parameters whose name contains a word of the list. In: the sample of a version. Out: the first difference, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from areal_rloo.engines.sglang.client import ServerClient
from areal_rloo.models.fingerprint import Digest, Fingerprint, Sample, place_of, sampled_names, take_sample

_JOINED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_HEAD = "lm_head.weight"  # not on a server that ties the embeddings


async def first_difference(
    client: ServerClient, sample: Sample, names: Iterable[str], *, timeout_s: float
) -> str | None:
    """Compare a sample with the server's parameters; return the first difference with the name and both values.

    Args:
        client: of the server.
        sample: fingerprints of the expected weights.
        names: of all parameters of the model.
        timeout_s: of the call.

    Raises:
        ServerRefusedError, ServerGoneError: the server gives no digests.
    """
    sampled = {place_of(fingerprint.names[0]) for fingerprint in sample.fingerprints}
    body = {
        "action": "checksum",
        "selector": "target",
        "skip_tensor_list": sorted({place_of(name) for name in names} - sampled),
    }
    answer = await client.ask("/weights_checker", body, timeout_s=timeout_s)
    try:
        ranks = sorted(answer["ranks"], key=lambda rank: int(rank["parallelism_info"][0]["tp_rank"]))
        found: list[Mapping[str, str]] = [rank["checksums"] for rank in ranks]
    except (KeyError, IndexError, TypeError, ValueError):
        return f"/weights_checker: expected the checksums of each rank, got {answer!r:.300}"
    differences = (_difference(expected, found) for expected in sample.fingerprints)
    return next((difference for difference in differences if difference is not None), None)


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


def _difference(expected: Fingerprint, ranks: list[Mapping[str, str]]) -> str | None:
    name = server_name(expected.names)
    if name == _HEAD and not any(name in rank for rank in ranks):
        return None
    found: list[Any] = [rank.get(name, "no such parameter") for rank in ranks]
    digests = [f"{part:016x}" for part in expected.parts]
    return None if found == digests else f"{name}: expected {', '.join(digests)}, found {', '.join(found)}"


def server_name(names: tuple[str, ...]) -> str:
    """Return SGLang's name of parameters that the server holds as one."""
    if len(names) == 1:
        return names[0]
    member = next(member for member in _JOINED if f".{member}." in names[0])
    return names[0].replace(member, _JOINED[member])
