"""The calls for weights of a vLLM server: load and compare, by the methods of `inside/areal_rloo_vllm.py`.

POST /collective_rpc calls a method on every rank. If the method raises, the answer is an error with the rank's message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_rloo.engines.server.api import BucketLayout, UpdateGroup, WeightsUnknownError
from areal_rloo.engines.server.client import ServerClient, ServerGoneError, ServerRefusedError
from areal_rloo.engines.server.readback import difference_of, server_name
from areal_rloo.engines.vllm.capabilities import Capabilities, call_ranks
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Sample

_CALL_TIMEOUT_S = 30.0  # of calls without weights


class VLLMWeights:
    """The update calls of a connection; `areal_rloo.engines.server.api.WeightCalls` documents the methods."""

    def __init__(self, client: ServerClient, capabilities: Capabilities) -> None:
        self._client = client
        self._num_ranks = capabilities.tensor_parallel
        self._group: str | None = None

    async def join(self, group: UpdateGroup) -> None:
        if self._group == group.name:
            return
        self._group = None
        body = {
            "host": group.host,
            "port": group.port,
            "name": group.name,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "backend": group.backend,
            "timeout_s": group.timeout_s,
        }
        await self._call("join", body, timeout_s=group.timeout_s)
        self._group = group.name

    async def load_buckets(self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]) -> None:
        self._group = None  # until the update succeeds
        for index, bucket in enumerate(buckets):
            body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
            try:
                failures = await self._call("receive", body, timeout_s=group.timeout_s)
            except ServerRefusedError as error:
                raise WeightsUnknownError(f"the update failed halfway: {error.words}") from error
            if index == 0 and None not in failures:
                raise EngineError(f"the sender's weights did not arrive: {failures[0]}")
            if failures != [None] * self._num_ranks:
                raise WeightsUnknownError(f"the update failed halfway: {failures}")
        await self._label(policy_version)
        self._group = group.name

    async def load_folder(self, policy_version: int, folder: Path, *, timeout_s: float) -> None:
        try:
            await self._call("read", {"folder": str(folder)}, timeout_s=timeout_s)
        except ServerRefusedError as error:
            raise WeightsUnknownError(f"version {policy_version} was not loaded: {error.words}") from error
        await self._label(policy_version)

    async def first_difference(self, sample: Sample, names: Iterable[str], *, timeout_s: float) -> str | None:
        held = [server_name(fingerprint.names) for fingerprint in sample.fingerprints]
        ranks = await self._call("digests", {"names": held}, timeout_s=timeout_s)
        return difference_of(sample, ranks)

    async def _label(self, policy_version: int) -> None:
        """Name the version of the tokens from now on, and look: the server would tag them with the former version."""
        try:
            body = {"new_version": str(policy_version)}
            await self._client.post("/update_weight_version", body, timeout_s=_CALL_TIMEOUT_S)
            named = await self._client.get("/weight_info", timeout_s=_CALL_TIMEOUT_S)
        except ServerRefusedError as error:
            raise WeightsUnknownError(f"version {policy_version} could not be named: {error.words}") from error
        if named.get("weight_version") != str(policy_version):
            raise WeightsUnknownError(f"version {policy_version} could not be named: the server answers {named}")

    async def _call(self, method: str, arguments: dict[str, Any], *, timeout_s: float) -> list[Any]:
        """Call a method on every rank; an answer without the result of each rank is no answer."""
        results = await call_ranks(self._client, method, arguments, timeout_s=timeout_s)
        if len(results) != self._num_ranks:
            raise ServerGoneError(f"/collective_rpc: expected results of {self._num_ranks} ranks, got {len(results)}")
        return results
