"""What a server can do: read from its own description (GET /openapi.json, /server_info) and from one short request.

SGLang's HTTP API differs from release to release. We ask instead of comparing version numbers: endpoints and the fields
of their bodies are in the OpenAPI document; whether completions say which weights made them, the first one shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_rloo.errors import ConfigError, EngineError

TESTED_VERSION = "0.5.23"
PROBE_TOKENS = (0,)
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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A server, as far as it concerns us.

    Attributes:
        version: of SGLang.
        tensor_parallel: devices it runs on.
        data_parallel: copies of the model behind it; we drive one.
        pipeline_parallel: stages that its layers are spread over; we count the ranks of one.
        context_tokens: longest prompt and completion together.
        prompt_tokens: longest prompt, a little less than the context.
        cache_tokens: how many the key/value cache holds.
        radix_cache: whether prompts that begin alike share their cache.
        cache_key: field of a request that keeps its cache apart from that of others.
        weight_versions: whether a completion says which weights made which tokens.
        update_session: whether an update is bracketed by begin_weight_update and end_weight_update.
        seeds: whether a sampling_seed has an effect (--enable-deterministic-inference).
        overlap: whether a step is launched before the token of the last one is there.
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


def read_capabilities(
    description: Mapping[str, Any],
    server_info: Mapping[str, Any],
    models: Mapping[str, Any],
    *,
    probe: Mapping[str, Any],
) -> Capabilities:
    """Put together what a server said.

    Args:
        description: its OpenAPI document.
        server_info: the answer of GET /server_info.
        models: the answer of GET /v1/models.
        probe: the answer to a request for one token.

    Raises:
        ConfigError: an endpoint, a field of one or a number is missing; names it, the version and what to install.
    """
    version = str(server_info.get("version", "of unknown version"))
    paths = description.get("paths", {})
    for path, fields in _NEEDED.items():
        if path not in paths:
            raise too_early(version, f"no endpoint {path}")
        missing = [field for field in fields if field not in _fields_of(description, path)]
        if missing:
            raise too_early(version, f"no field {', '.join(missing)} in {path}")
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
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise too_early(version, f"/server_info or /v1/models without {error}") from error


def check_capabilities(
    found: Capabilities, *, key: str, tensor_parallel: int, context_tokens: int, pause: Literal["in_place", "retract"]
) -> None:
    """Refuse a server that cannot do what the config asks of it.

    Args:
        found: what it can do.
        key: of the config, that names the server in messages.
        tensor_parallel: rollout.tensor_parallel.
        context_tokens: longest prompt and completion together.
        pause: rollout.sglang.pause.

    Raises:
        ConfigError: one line with the key, what was expected, what came and what to do.
    """
    if found.data_parallel != 1:
        raise ConfigError(
            f"{key}: expected a server with dp_size 1, got {found.data_parallel}; start one server for each copy, and "
            "set rollout.num_workers to their number"
        )
    if found.pipeline_parallel != 1:
        raise ConfigError(
            f"{key}: expected a server with pp_size 1, got {found.pipeline_parallel}; spread the model with tp_size "
            "and rollout.tensor_parallel"
        )
    if found.tensor_parallel != tensor_parallel:
        raise ConfigError(
            f"{key}: expected a server with tp_size {tensor_parallel}, as rollout.tensor_parallel says, got "
            f"{found.tensor_parallel}; change one of the two"
        )
    holds = min(found.context_tokens, found.cache_tokens, found.prompt_tokens + 1)
    if holds < context_tokens:
        raise ConfigError(
            f"{key}: expected room for {context_tokens} tokens (data.max_prompt_tokens and the longest completion), "
            f"got a server for {holds} (context {found.context_tokens}, cache {found.cache_tokens}, longest prompt "
            f"{found.prompt_tokens}); ask for less, or "
            "start it with a larger --context-length or --max-total-tokens"
        )
    if pause == "in_place" and found.weight_versions and found.radix_cache and found.cache_key is None:
        raise ConfigError(
            f"{key}: SGLang {found.version} cannot keep the cache of two versions apart, so prompts would go on with "
            "weights that are gone; start it with --disable-radix-cache, or set rollout.sglang.pause=retract"
        )


def versions_of(spans: object, num_tokens: int) -> list[int]:
    """The policy version of each token, from a completion's `weight_versions`.

    What the server labels with no version of ours was made by weights nobody knows: the list ends before it.

    Raises:
        EngineError: the spans do not follow one another from the first token to the last.
    """
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        raise EngineError(f"expected weight_versions as a list of spans, got {spans!r}")
    versions: list[int] = []
    known = True
    covered = 0
    for span in spans:
        try:
            label, start, end = span["version"], span["start"], span["end"]
        except (KeyError, TypeError) as error:
            raise EngineError(f"expected a span with version, start and end, got {span!r}") from error
        if not isinstance(start, int) or not isinstance(end, int) or start != covered or end < start:
            raise EngineError(f"expected weight_versions that go on at token {covered}, got {spans!r}")
        known = known and isinstance(label, str) and label.isdecimal()
        if known:
            versions += [int(label)] * (end - start)
        covered = end
    if covered != num_tokens:
        raise EngineError(f"expected weight_versions of all {num_tokens} tokens, got {spans!r}")
    return versions


def _fields_of(description: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The fields of the body of POST `path`; none where the document does not say."""
    try:
        schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            schema = description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        fields: Mapping[str, Any] = schema["properties"]
    except KeyError:
        return {}
    return fields


def too_early(version: str, lacks: str) -> ConfigError:
    """The refusal of a server that lacks something."""
    return ConfigError(
        f"rollout.sglang: the server is SGLang {version} and has {lacks}; install sglang=={TESTED_VERSION} in its "
        "environment"
    )
