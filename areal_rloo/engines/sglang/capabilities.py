"""The features of an SGLang server, which differ between releases.

Instead of comparing version numbers, we look up endpoints and the fields of their bodies in GET /openapi.json. Sizes
come from GET /server_info. The answer to a short request shows whether completions carry version tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from areal_rloo.engines.installed import SGLANG
from areal_rloo.engines.server.answers import Count, typed
from areal_rloo.engines.server.client import Json, ServerClient, ServerRefusedError, fields_of, paths_of
from areal_rloo.errors import ConfigError, EngineError, shortened
from areal_rloo.models.fingerprint import Digest

NEEDED = {
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
_PROBE_TIMEOUT_S = 300.0  # the first request may compile kernels


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
        digest: of the server's parameters; None if the server gives none, or of changed parameters.
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

    @property
    def separates_prompts(self) -> bool:
        return self.cache_key is not None or not self.radix_cache


async def ask_capabilities(client: ServerClient, *, timeout_s: float) -> Capabilities:
    """Ask a server for the capabilities; generates a token.

    Raises:
        ConfigError: the server lacks a needed endpoint or field.
    """
    try:
        description = await client.get("/openapi.json", timeout_s=timeout_s)
        server_info = await client.get("/server_info", timeout_s=timeout_s)
        models = await client.get("/v1/models", timeout_s=timeout_s)
    except ServerRefusedError as error:
        if error.status != 404:
            raise
        raise too_early(f"no endpoint {error.words.partition(':')[0]}") from error
    body = {"input_ids": [0], "return_logprob": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    probe = await client.ask("/generate", body, timeout_s=_PROBE_TIMEOUT_S)
    return read_capabilities(description, server_info, models, probe=probe)


def read_capabilities(description: Json, server_info: Json, models: Json, *, probe: Json) -> Capabilities:
    """Combine the OpenAPI document, GET /server_info, GET /v1/models, and the answer to a request for a token.

    Raises:
        ConfigError: an endpoint, a field or a number is missing. The message names the version to install.
    """
    version = shortened(str(server_info.get("version", "of unknown version")))
    paths = paths_of(description)
    for path, fields in NEEDED.items():
        if path not in paths:
            raise too_early(f"no endpoint {path}", version=version)
        missing = [field for field in fields if field not in fields_of(description, path)]
        if missing:
            raise too_early(f"no field {', '.join(missing)} in {path}", version=version)
    asked = fields_of(description, "/generate")
    try:
        return Capabilities(
            version=version,
            tensor_parallel=_count(server_info, "tp_size"),
            data_parallel=_count(server_info, "dp_size"),
            pipeline_parallel=_count({"pp_size": 1, **server_info}, "pp_size"),
            context_tokens=_count(models["data"][0], "max_model_len"),
            prompt_tokens=_count(server_info, "max_req_input_len"),
            cache_tokens=_count(server_info, "max_total_num_tokens"),
            radix_cache=not server_info["disable_radix_cache"],
            cache_key="extra_key" if "extra_key" in asked else "cache_salt" if "cache_salt" in asked else None,
            weight_versions="weight_versions" in probe.get("meta_info", {}),
            update_session={"/begin_weight_update", "/end_weight_update"} <= set(paths),
            seeds=bool(server_info.get("enable_deterministic_inference")),
            overlap=not server_info.get("disable_overlap_schedule"),
            digest=_digest(description, server_info),
        )
    except (KeyError, IndexError, TypeError, AttributeError, EngineError) as error:
        raise too_early(f"/server_info or /v1/models without {error}", version=version) from error


def _count(answer: Json, key: str) -> int:
    """Return a number of an answer; raises KeyError without the key, and EngineError for another value."""
    return cast("int", typed(answer[key], Count, name=key))


def _digest(description: Json, server_info: Json) -> Digest | None:
    """Return the digest of /weights_checker. A quantized server reports digests of other numbers than ours."""
    fields = fields_of(description, "/weights_checker")
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


def too_early(lacks: str, *, version: str = "of unknown version") -> ConfigError:
    return ConfigError(
        f"rollout.sglang: the server is SGLang {version} and has {lacks}; install sglang=={SGLANG.tested_version} in "
        "its environment"
    )
