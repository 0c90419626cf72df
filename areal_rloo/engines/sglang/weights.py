"""The calls for weights of an SGLang server: load through a process group or from files, and compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_rloo.engines.server.api import BucketLayout, UpdateGroup, WeightsUnknownError
from areal_rloo.engines.server.client import ServerClient, ServerGoneError, ServerRefusedError
from areal_rloo.engines.sglang.capabilities import Capabilities
from areal_rloo.engines.sglang.readback import first_difference
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Sample

_CALL_TIMEOUT_S = 30.0  # of calls without weights
_NOTHING_LOADED = "Failed to receive weights"  # SGLang's message if a bucket did not arrive at all


class SGLangWeights:
    """The update calls of a connection; `areal_rloo.engines.server.api.WeightCalls` documents the methods."""

    def __init__(self, client: ServerClient, capabilities: Capabilities, *, keeps_cache: bool) -> None:
        self._client = client
        self._keeps_cache = keeps_cache
        self._session = capabilities.update_session
        self._num_ranks = capabilities.tensor_parallel
        self._group: str | None = None
        self._group_is_whole = False

    async def join(self, group: UpdateGroup) -> None:
        if self._group == group.name and self._group_is_whole:
            return
        if self._group is not None:
            former, self._group = self._group, None
            with suppress(ServerRefusedError):  # the server does not have this group
                await self._post("/destroy_weights_update_group", {"group_name": former})
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body, group.timeout_s)
        self._group = group.name
        self._group_is_whole = True

    async def load_buckets(self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]) -> None:
        self._group_is_whole = False  # until the update succeeds
        if self._session:
            try:
                await self._post("/begin_weight_update")
            except ServerRefusedError:  # an interrupted update left a session open
                await self._end_if_open()
                await self._post("/begin_weight_update")
        try:
            for index, bucket in enumerate(buckets):
                last = index == len(buckets) - 1
                await self._load(bucket, group, version=policy_version if last else None, first=index == 0)
        except ServerGoneError:
            raise
        except EngineError:
            if self._session:
                await self._end_if_open()
            raise
        if self._session:
            try:
                await self._post("/end_weight_update")
            except ServerRefusedError as error:
                raise WeightsUnknownError(f"the update did not end: {error}") from error
        self._group_is_whole = True

    async def load_folder(self, policy_version: int, folder: Path, *, timeout_s: float) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": str(policy_version),
            "flush_cache": not self._keeps_cache,
            "abort_all_requests": False,
        }
        try:
            await self._post("/update_weights_from_disk", body, timeout_s)
        except ServerRefusedError as error:  # SGLang "rolls back" to the failed folder
            raise WeightsUnknownError(f"version {policy_version} was not loaded: {error.words}") from error

    async def first_difference(self, sample: Sample, names: Iterable[str], *, timeout_s: float) -> str | None:
        return await first_difference(self._client, sample, names, timeout_s=timeout_s)

    async def _post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> None:
        await self._client.post(path, body, timeout_s=timeout_s or _CALL_TIMEOUT_S)

    async def _end_if_open(self) -> None:
        with suppress(ServerRefusedError):  # no session is open
            await self._post("/end_weight_update")

    async def _load(self, bucket: BucketLayout, group: UpdateGroup, *, version: int | None, first: bool) -> None:
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            # In place, requests under way and later requests keep using the cache; otherwise the cache is flushed.
            "flush_cache": version is not None and not self._keeps_cache,
            "abort_all_requests": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        try:
            await self._post("/update_weights_from_distributed", body, group.timeout_s)
        except ServerRefusedError as error:
            # Only the first of several ranks reports; another rank may have loaded the bucket.
            if first and self._num_ranks == 1 and error.words.partition(": ")[2].startswith(_NOTHING_LOADED):
                raise EngineError(f"the sender's weights did not arrive: {error.words}") from error
            raise WeightsUnknownError(f"the update failed halfway: {error.words}") from error
