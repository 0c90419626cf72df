"""The parts of a server with differences between SGLang, vLLM and others: calls, options, facts.

A `ServerKind` starts servers and connects to them. A `ServerApi` is a connection to a server; its `weights` load and
compare weights. Everything else about servers is shared: see the other files of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from areal_rloo.engines.installed import ServerPackage
from areal_rloo.engines.server.answers import Output
from areal_rloo.engines.server.client import ServerClient
from areal_rloo.engines.server.flights import Flight
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Digest, Sample

Pause = Literal["in_place", "retract"]
UpdateMode = Literal["in_place", "retract", "abort"]
Arguments = Mapping[str, str | float | bool | None]


class WeightsUnknownError(EngineError):
    """The server reports a failed update, and part of it may have been loaded."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The settings of a managed server.

    Attributes:
        model_path: folder of the weights of version 0.
        device: cpu or cuda.
        dtype: float32 or bfloat16.
        tensor_parallel: number of the server's devices.
        num_slots: completions under way at a time.
        context_tokens: longest prompt and completion together.
        num_threads: CPU threads; 0 for torch's default.
        model_context_tokens: the model's longest context; None if the config does not tell.
        sleeps: True if the server gives its memory to a learner during train steps.
        prefix_cache: False if the server cannot separate the cached prompts of two versions.
        has_version: True if the files are version 0; False: no token before the learner's adapters have come.
    """

    model_path: Path
    device: str
    dtype: str
    tensor_parallel: int
    num_slots: int
    context_tokens: int
    num_threads: int
    sleeps: bool = False
    model_context_tokens: int | None = None
    prefix_cache: bool = True
    has_version: bool = True


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """A process group of the sender (rank 0) and servers. A server joins again whenever the name changes.

    Attributes:
        host, port: of the sender's TCP store.
        name: unique among all groups.
        rank_offset: rank of this server's first device.
        world_size: the sender and every device of every server.
        timeout_s: of each call with the sender.
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
    """A broadcast: a uint8 tensor of these tensors, adjacent without gaps.

    Attributes:
        names: Hugging Face parameter names.
        dtypes: torch's names without the prefix: bfloat16.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class Capabilities(Protocol):
    """The features and sizes of a server, for the shared code."""

    @property
    def version(self) -> str: ...

    @property
    def tensor_parallel(self) -> int: ...

    @property
    def prompt_tokens(self) -> int:
        """Longest prompt; may be less than the context."""

    @property
    def weight_versions(self) -> bool:
        """True if a completion tells the weights of each token."""

    @property
    def separates_prompts(self) -> bool:
        """True if requests can be kept from the cached prompts of other versions."""

    @property
    def digest(self) -> Digest | None:
        """Digest of the server's parameters; None if the server gives no known digest."""


class WeightCalls(Protocol):
    """The calls for loading and comparing weights. Each raises `ServerGoneError` without an answer."""

    async def join(self, group: UpdateGroup) -> None:
        """Join the sender's group, unless the server has joined already and no call in the group failed since."""

    async def load_buckets(self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]) -> None:
        """Receive every bucket from the sender.

        Raises:
            WeightsUnknownError: part of the weights may have been loaded.
            EngineError: nothing was loaded; the weights are unchanged.
        """

    async def load_folder(self, policy_version: int, folder: Path, *, timeout_s: float) -> None:
        """Read the safetensors files of a folder.

        Raises:
            WeightsUnknownError: part of the weights may have been loaded.
        """

    async def first_difference(self, sample: Sample, names: Iterable[str], *, timeout_s: float) -> str | None:
        """Compare a sample with the server's parameters; return the first difference with the name and both values.

        Args:
            sample: fingerprints of the expected weights.
            names: of all parameters of the model.
            timeout_s: of the call.

        Raises:
            ServerRefusedError: the server gives no digests.
        """


class ServerApi(Protocol):
    """The calls of a reachable server. Created and used on the engine's event loop."""

    @property
    def client(self) -> ServerClient: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def weights(self) -> WeightCalls: ...

    def check(self, *, key: str, plan: ServerPlan, pause: Pause) -> None:
        """Refuse a server unfit for the plan with a ConfigError; the message starts with the config key."""

    async def generate(
        self, flight: Flight, *, cache_name: str, sent_version: int, mode: UpdateMode, vocab_size: int
    ) -> Output:
        """Generate the remaining tokens of a flight, and check the answer. There is no timeout: the caller cancels.

        Args:
            flight: with the id and the prompt of this request.
            cache_name: a cached prompt belongs to certain weights; requests share prompts only under the same name.
            sent_version: the server's version now.
            mode: how an update pauses generation.
            vocab_size: token ids are smaller.

        Raises:
            ServerRefusedError: the server refuses the request.
            EngineError: the answer is not a completion.
        """

    async def abort(self, request_id: str, *, timeout_s: float) -> None:
        """End a request, which returns the tokens so far. A server may ignore an abort that precedes the request."""

    async def pause(self, mode: UpdateMode, *, timeout_s: float) -> None:
        """Stop generation. In mode abort no request is under way."""

    async def resume(self, *, timeout_s: float) -> None:
        """Continue generation; no error if the server was not paused."""

    async def sleep(self, *, timeout_s: float) -> None:
        """Discard the cache, and free its memory on a GPU (`ServerPlan.sleeps`); no request is under way."""

    async def wake(self, *, timeout_s: float) -> None:
        """Take memory for the cache again, and continue."""


class ServerKind(Protocol):
    """A kind of server.

    Attributes:
        package: of the server.
        harmless: words of log entries without the cause of the end of a server.
    """

    package: ClassVar[ServerPackage]
    harmless: ClassVar[tuple[str, ...]]

    def command(self, python: str, arguments: Arguments, plan: ServerPlan, *, port: int, config: Path) -> list[str]:
        """Return the command of a server; `config` names the file with the api key."""

    def environment(self, plan: ServerPlan) -> Mapping[str, str | None]:
        """Return the changes of the environment variables of a server; None leaves a variable out."""

    async def label(self, client: ServerClient, *, timeout_s: float) -> str:
        """Return the server's name for its weights, and end a pause left by a former engine.

        Raises:
            ServerRefusedError, ServerGoneError: the server is not ready.
            ConfigError: the server lacks the call.
        """

    async def began(self, client: ServerClient, *, timeout_s: float) -> None:
        """Name the weights of a managed server version 0, right after the start."""

    async def connect(self, client: ServerClient, *, pause: Pause, timeout_s: float) -> ServerApi:
        """Ask a healthy server for the capabilities. `pause` is the config's; see `Connection.update_mode`.

        Raises:
            ConfigError: the server lacks a needed feature.
        """


@dataclass(frozen=True, slots=True)
class Connection:
    """A reachable server.

    Attributes:
        label: the server's name for the weights.
        update_mode: how generation pauses for new weights. A server without version tags is only updated in mode
            abort, while no request is under way (see `answers.checked_output`).
        digest: compares the server's parameters with published ones; None if these cannot be compared.
    """

    api: ServerApi
    label: str
    update_mode: UpdateMode
    digest: Digest | None = None
