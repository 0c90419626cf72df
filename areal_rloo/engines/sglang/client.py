"""The HTTP API of a server: the calls, their two errors, and the features, which differ between releases of SGLang.

Instead of comparing version numbers, we look up endpoints and the fields of their bodies in GET /openapi.json. Sizes
come from GET /server_info. The answer to a short request shows whether completions carry version tags.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Literal

import aiohttp
import msgspec

from areal_rloo.decoding import from_json, read_body
from areal_rloo.errors import ConfigError, DecodeError, EngineError
from areal_rloo.models.fingerprint import Digest

TESTED_VERSION = "0.5.23"
_Json = Mapping[str, Any]
_NEEDED = {
    "/generate": ("input_ids", "sampling_params", "return_logprob", "rid"),
    "/abort_request": ("rid", "abort_all"),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/init_weights_update_group": ("master_address", "rank_offset", "world_size", "group_name", "backend"),
    "/destroy_weights_update_group": ("group_name",),
    "/update_weights_from_distributed": ("names", "dtypes", "shapes", "load_format", "flush_cache", "weight_version"),
    "/update_weights_from_disk": ("model_path", "flush_cache", "weight_version"),
    "/health": (),
}
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
_METRICS_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 300.0  # the first request may compile kernels
_MAX_CHARACTERS = 500  # of a server's message in ours
_MOST_BYTES = 64 * 2**20  # of an answer: the logprobs of half a million tokens
_PIECE_BYTES = 1 << 16


class ServerGoneError(EngineError):
    """The server gave no answer, a broken answer, or no answer before the timeout."""


class ServerRefusedError(EngineError):
    """The server answered with an error status, or with a redirect, which we never follow."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {words}")
        self.status = status
        self.words = words


class ServerClient:
    """The calls of a server. Created and used on the same event loop."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers={**self._headers, "Content-Type": "application/json", "Accept-Encoding": "identity"},
            # The slots limit the number of requests. The server closes a connection after 5 s without a request; a POST
            # that takes such a connection at that moment fails, so connections are closed earlier here.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            auto_decompress=False,  # a few compressed bytes can become gigabytes
        )

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        return _parsed(path, await self._ask("GET", path, None, timeout_s))

    async def text(self, path: str, *, timeout_s: float) -> str:
        return (await self._ask("GET", path, None, timeout_s)).decode(errors="replace")

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> None:
        await self._ask("POST", path, body or {}, timeout_s)

    async def ask(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Post, and return the answer."""
        return _parsed(path, await self._ask("POST", path, body, timeout_s))

    async def generate(self, body: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Generate a completion. Without a timeout the caller cancels the call (`sending.Sending`)."""
        return _parsed("/generate", await self._ask("POST", "/generate", body, timeout_s))

    async def capabilities(self, *, timeout_s: float) -> Capabilities:
        """Ask the server for the capabilities; generates a token.

        Raises:
            ConfigError: the server lacks a needed endpoint or field.
        """
        try:
            description = await self.get("/openapi.json", timeout_s=timeout_s)
            server_info = await self.get("/server_info", timeout_s=timeout_s)
            models = await self.get("/v1/models", timeout_s=timeout_s)
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            raise too_early(f"no endpoint {error.words.partition(':')[0]}") from error
        body = {"input_ids": [0], "return_logprob": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        probe = await self.generate(body, timeout_s=_PROBE_TIMEOUT_S)
        return read_capabilities(description, server_info, models, probe=probe)

    def metrics_text(self) -> str:
        """Return /metrics; empty if the server does not answer. Blocks, so call from another thread."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        asked = urllib.request.Request(f"{self.url}/metrics", headers=self._headers)
        ends_s = time.monotonic() + _METRICS_TIMEOUT_S
        text = bytearray()
        try:
            with direct.open(asked, timeout=_METRICS_TIMEOUT_S) as reply:
                while piece := reply.read1(_PIECE_BYTES):
                    text += piece
                    if len(text) > _MOST_BYTES or time.monotonic() > ends_s:
                        return ""
        except (OSError, HTTPException):
            return ""
        return text.decode(errors="replace")

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        data = None if body is None else msgspec.json.encode(body)
        try:
            asking = self._session.request(method, self.url + path, data=data, timeout=timeout, allow_redirects=False)
            async with asking as reply:
                content = await read_body(reply.content, most_bytes=_MOST_BYTES)
        except TimeoutError as error:
            raise ServerGoneError(f"{path}: no answer within {timeout_s or _CONNECT_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if not self._session.closed:
                raise
            raise ServerGoneError(f"{path}: the connection was closed") from error
        if content is None:
            raise ServerGoneError(f"{path}: the answer has more than {_MOST_BYTES} bytes")
        if reply.status >= 300:
            raise ServerRefusedError(reply.status, f"{path}: {_words(content)}")
        return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse every redirect: the API key is for this server."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features and sizes of a server.

    Attributes:
        data_parallel: number of model copies; we support 1.
        context_tokens: longest prompt and completion together.
        prompt_tokens: longest prompt, a little less than the context.
        radix_cache: True if prompts with a common beginning share cache entries.
        cache_key: field of a request that separates cache entries; requests share entries only under the same value.
        weight_versions: True if a completion tells the weights of each token.
        update_session: True if begin_weight_update and end_weight_update must bracket an update.
        seeds: True if a sampling_seed has an effect (--enable-deterministic-inference).
        overlap: True if a step is launched before the token of the last step has arrived.
        digest: of the parameters that the server reports; None if the server reports none, or of changed parameters.
    """

    version: str
    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    context_tokens: int
    prompt_tokens: int
    cache_tokens: int
    radix_cache: bool
    cache_key: Literal["extra_key", "cache_salt"] | None
    weight_versions: bool
    update_session: bool
    seeds: bool
    overlap: bool
    digest: Digest | None


@dataclass(frozen=True, slots=True)
class Connection:
    """A server that answered.

    Attributes:
        label: the server's name for the weights.
        update_mode: how generation pauses for new weights. A server without version tags is only updated in mode
            abort, while no request is under way (see `flights.read_output`).
        digest: compares the server's parameters with published ones; None if these cannot be compared.
    """

    client: ServerClient
    capabilities: Capabilities
    label: str
    update_mode: Literal["in_place", "retract", "abort"]
    digest: Digest | None = None


def read_capabilities(description: _Json, server_info: _Json, models: _Json, *, probe: _Json) -> Capabilities:
    """Combine the OpenAPI document, GET /server_info, GET /v1/models, and the answer to a request for a token.

    Raises:
        ConfigError: an endpoint, a field or a number is missing. The message names the version to install.
    """
    version = str(server_info.get("version", "of unknown version"))
    paths = description.get("paths", {})
    for path, fields in _NEEDED.items():
        if path not in paths:
            raise too_early(f"no endpoint {path}", version=version)
        missing = [field for field in fields if field not in _fields_of(description, path)]
        if missing:
            raise too_early(f"no field {', '.join(missing)} in {path}", version=version)
    asked = _fields_of(description, "/generate")
    try:
        return Capabilities(
            version=version,
            tensor_parallel=int(server_info["tp_size"]),
            data_parallel=int(server_info["dp_size"]),
            pipeline_parallel=int(server_info.get("pp_size", 1)),
            context_tokens=int(models["data"][0]["max_model_len"]),
            prompt_tokens=int(server_info["max_req_input_len"]),
            cache_tokens=int(server_info["max_total_num_tokens"]),
            radix_cache=not server_info["disable_radix_cache"],
            cache_key="extra_key" if "extra_key" in asked else "cache_salt" if "cache_salt" in asked else None,
            weight_versions="weight_versions" in probe.get("meta_info", {}),
            update_session={"/begin_weight_update", "/end_weight_update"} <= set(paths),
            seeds=bool(server_info.get("enable_deterministic_inference")),
            overlap=not server_info.get("disable_overlap_schedule"),
            digest=_digest(description, server_info),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise too_early(f"/server_info or /v1/models without {error}", version=version) from error


def _digest(description: _Json, server_info: _Json) -> Digest | None:
    """Return the digest of /weights_checker. A quantized server reports digests of other numbers than ours."""
    fields = _fields_of(description, "/weights_checker")
    if server_info.get("quantization") or not {"action", "skip_tensor_list", "selector"} <= set(fields):
        return None
    return "sha256" if server_info.get("device") == "cpu" else "tiles"


def check_capabilities(
    found: Capabilities, *, key: str, tensor_parallel: int, context_tokens: int, pause: Literal["in_place", "retract"]
) -> None:
    """Refuse a server unfit for the config with a ConfigError; the message starts with the config key."""
    said = ", as rollout.tensor_parallel says"
    for size, got, expected, why, remedy in (
        ("dp_size", found.data_parallel, 1, "", "start a server for each copy, and set rollout.num_workers to match"),
        ("pp_size", found.pipeline_parallel, 1, "", "spread the model with tp_size and rollout.tensor_parallel"),
        ("tp_size", found.tensor_parallel, tensor_parallel, said, "change either of the two"),
    ):
        if got != expected:
            raise ConfigError(f"{key}: expected a server with {size} {expected}{why}, got {got}; {remedy}")
    holds = min(found.context_tokens, found.cache_tokens, found.prompt_tokens + 1)
    if holds < context_tokens:
        raise ConfigError(
            f"{key}: expected room for {context_tokens} tokens (data.max_prompt_tokens and the longest completion), "
            f"got a server for {holds} (context {found.context_tokens}, cache {found.cache_tokens}, longest prompt "
            f"{found.prompt_tokens}); ask for less, or start it with a larger --context-length or --max-total-tokens"
        )
    if pause == "in_place" and found.weight_versions and found.radix_cache and found.cache_key is None:
        raise ConfigError(
            f"{key}: SGLang {found.version} cannot separate the cached prompts of two versions, so completions would "
            "continue prompts of former weights; start it with --disable-radix-cache, or set "
            "rollout.sglang.pause=retract"
        )


def _fields_of(description: _Json, path: str) -> _Json:
    """Return the fields of the body of POST `path`; none if the document has no such body."""
    try:
        schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = next((option for option in schema.get("anyOf", ()) if "$ref" in option), schema)  # an optional body
        while "$ref" in schema:
            schema = description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return dict(schema["properties"])
    except KeyError:
        return {}


def too_early(lacks: str, *, version: str = "of unknown version") -> ConfigError:
    return ConfigError(
        f"rollout.sglang: the server is SGLang {version} and has {lacks}; install sglang=={TESTED_VERSION} in its "
        "environment"
    )


def _parsed(path: str, content: bytes) -> dict[str, Any]:
    try:
        return from_json(content, dict[str, Any])
    except DecodeError as error:
        raise ServerGoneError(f"{path}: expected a JSON object, got {content[:_MAX_CHARACTERS]!r}") from error


def _words(content: bytes) -> str:
    """Return the message of a refusal, without the JSON around."""
    try:
        said: Any = from_json(content, object)
    except DecodeError:
        said = content.decode(errors="replace")
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return " ".join(str(said).split())[:_MAX_CHARACTERS]
