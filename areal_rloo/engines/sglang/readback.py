"""Read a sample of the parameters back from the server, and compare the sample with the published weights.

POST /weights_checker gives a digest of each parameter on each rank, under SGLang's names. `skip_tensor_list` leaves out
parameters whose name contains a word of the list. In: the sample of a version. Out: the first difference, or None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from areal_rloo.engines.server.answers import Count, typed
from areal_rloo.engines.server.client import Json, ServerClient
from areal_rloo.engines.server.readback import difference_of
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Sample, place_of


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
    return difference_in(answer, sample)


def difference_in(answer: Json, sample: Sample) -> str | None:
    """Return the first difference between an answer of /weights_checker and a sample."""
    try:
        ranks = sorted(answer["ranks"], key=_rank_of)
        found = [rank["checksums"] for rank in ranks]
    except (KeyError, IndexError, TypeError, EngineError):
        return f"/weights_checker: expected the checksums of each rank, got {answer!r:.300}"
    return difference_of(sample, found)


def _rank_of(rank: Any) -> int:
    return cast("int", typed(rank["parallelism_info"][0]["tp_rank"], Count, name="tp_rank"))
