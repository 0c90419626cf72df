"""New weights for a server that generates: the calls of one update, in order, and what is known when one of them fails.

    join the sender's group ─► pause ─► begin ─► each bucket ─► end ─► continue

The engine sends no request from before the pause until after the continue, and continues whatever failed in between. A
call that misses its deadline is a ServerGoneError: the server hangs, and is started again, or waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal_rloo.engines.sglang.capabilities import Capabilities
from areal_rloo.engines.sglang.client import ServerClient, ServerGoneError, ServerRefusedError
from areal_rloo.errors import EngineError

_CALL_TIMEOUT_S = 30.0  # of calls that move no weights
_NOTHING_LOADED = "Failed to receive weights"  # what SGLang says when a bucket did not even arrive


class WeightsUnknownError(EngineError):
    """The server says that an update failed, and part of it may have been loaded."""


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """A process group of the sender (rank 0) and servers. It is joined anew whenever its name changes.

    Attributes:
        host: of the sender's TCP store; `port` is its port.
        name: unlike that of every group before it.
        rank_offset: rank of this server's first device.
        world_size: the sender and every device of every server.
        backend: of torch.distributed.
        timeout_s: of each call that waits for the sender.
    """

    host: str
    port: int
    name: str
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One broadcast: a uint8 tensor of these tensors, one behind the other without gaps.

    Attributes:
        names: Hugging Face parameter names.
        dtypes: as torch spells them without its name: bfloat16.
        shapes: of each.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class ServerUpdates:
    """The updates of one connection to one server; one at a time. Used on the engine's event loop."""

    def __init__(
        self, client: ServerClient, capabilities: Capabilities, *, pause: Literal["in_place", "retract"]
    ) -> None:
        # A server that does not tag its tokens is updated with nothing under way (see flight.read_output).
        self.mode: Literal["in_place", "retract", "abort"] = pause if capabilities.weight_versions else "abort"
        self._client = client
        self._session = capabilities.update_session
        self._num_ranks = capabilities.tensor_parallel
        self._group: str | None = None
        self._group_is_whole = False

    async def join(self, group: UpdateGroup) -> None:
        """Meet the sender, unless this group was joined and nothing failed in it since."""
        if self._group == group.name and self._group_is_whole:
            return
        if self._group is not None:
            former, self._group = self._group, None
            with suppress(ServerRefusedError):  # the server does not have it
                body: dict[str, object] = {"group_name": former}
                await self._client.post("/destroy_weights_update_group", body, timeout_s=_CALL_TIMEOUT_S)
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._client.post("/init_weights_update_group", body, timeout_s=group.timeout_s)
        self._group = group.name
        self._group_is_whole = True

    async def pause(self, *, timeout_s: float) -> None:
        """Stand still. In mode abort nothing is under way any more."""
        await self._client.post("/pause_generation", {"mode": self.mode}, timeout_s=timeout_s)

    async def resume(self) -> None:
        """Go on."""
        await self._client.post("/continue_generation", {}, timeout_s=_CALL_TIMEOUT_S)

    async def load_buckets(self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]) -> None:
        """Receive every bucket from the sender.

        Raises:
            WeightsUnknownError: part of it may have been loaded.
            EngineError: nothing was loaded; the weights are those of before.
        """
        self._group_is_whole = False  # until all of it went well
        if self._session:
            await self._begin()
        try:
            for index, bucket in enumerate(buckets):
                last = index == len(buckets) - 1
                await self._load(bucket, group, version=policy_version if last else None, first=index == 0)
        except ServerGoneError:
            raise
        except EngineError:
            if self._session:
                await self._end_if_it_can()
            raise
        if self._session:
            try:
                await self._client.post("/end_weight_update", {}, timeout_s=_CALL_TIMEOUT_S)
            except ServerRefusedError as error:
                raise WeightsUnknownError(f"the update did not end: {error}") from error
        self._group_is_whole = True

    async def load_folder(self, policy_version: int, folder: Path, *, timeout_s: float) -> None:
        """Read the safetensors files of a folder. SGLang rolls a failed load back to the very folder that failed.

        Raises:
            WeightsUnknownError: part of it may have been loaded.
        """
        body = {
            "model_path": str(folder),
            "weight_version": str(policy_version),
            "flush_cache": self.mode != "in_place",
            "abort_all_requests": False,
        }
        try:
            await self._client.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        except ServerRefusedError as error:
            raise WeightsUnknownError(f"version {policy_version} was not loaded: {error.words}") from error

    async def _begin(self) -> None:
        try:
            await self._client.post("/begin_weight_update", {}, timeout_s=_CALL_TIMEOUT_S)
        except ServerRefusedError:  # an update that was cut off left it open
            await self._end_if_it_can()
            await self._client.post("/begin_weight_update", {}, timeout_s=_CALL_TIMEOUT_S)

    async def _end_if_it_can(self) -> None:
        with suppress(ServerRefusedError):  # none is open
            await self._client.post("/end_weight_update", {}, timeout_s=_CALL_TIMEOUT_S)

    async def _load(self, bucket: BucketLayout, group: UpdateGroup, *, version: int | None, first: bool) -> None:
        last = version is not None
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            # In place the cache is kept, by those under way as well; else nothing may be read from it any more.
            "flush_cache": last and self.mode != "in_place",
            "abort_all_requests": False,
        }
        if last:
            body["weight_version"] = str(version)
        try:
            await self._client.post("/update_weights_from_distributed", body, timeout_s=group.timeout_s)
        except ServerRefusedError as error:
            # Of several ranks the first alone speaks, and another may have loaded what it did not get.
            if first and self._num_ranks == 1 and error.words.partition(": ")[2].startswith(_NOTHING_LOADED):
                raise EngineError(f"the sender's weights did not arrive: {error.words}") from error
            raise WeightsUnknownError(f"an update ended in its middle: {error.words}") from error
