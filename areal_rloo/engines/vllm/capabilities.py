"""The features of a vLLM server, and the call of a method on every rank.

Endpoints are looked up in GET /openapi.json, sizes come from GET /v1/models and from the extension of the workers. The
answer to a short request shows whether completions carry version tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_rloo.engines.installed import VLLM
from areal_rloo.engines.server.answers import Count, typed
from areal_rloo.engines.server.client import Json, ServerClient, ServerRefusedError, paths_of
from areal_rloo.errors import ConfigError, EngineError
from areal_rloo.models.fingerprint import Digest

_PROTOCOL = 1  # of inside/areal_rloo_vllm.py
_NEEDED = {
    "/inference/v1/generate": "start it with --enable-scale-out",
    "/inference/v1/abort_requests": "start it with --enable-scale-out",
    **dict.fromkeys(
        ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache"),
        f"start it with VLLM_SERVER_DEV_MODE=1, or install vllm=={VLLM.tested_version} in its environment",
    ),
}
_PROBE_TIMEOUT_S = 300.0  # the first request may compile kernels
_EXTENSION = (
    "start it with --worker-extension-cls areal_rloo_vllm.Weights, and the folder areal_rloo/engines/vllm/inside of "
    "this package in PYTHONPATH"
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features and sizes of a server.

    Attributes:
        data_parallel: number of model copies; we support 1.
        context_tokens: longest prompt and completion together; the cache has room for at least that.
        logprobs: the mode of logprobs; we need those of the sampling distribution.
        weight_versions: True if a completion tells the weights of each token.
        digest: of the server's parameters; None if these are not the published ones.
    """

    version: str
    tensor_parallel: int
    data_parallel: int
    pipeline_parallel: int
    context_tokens: int
    logprobs: str
    weight_versions: bool
    digest: Digest | None

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - 1

    @property
    def separates_prompts(self) -> bool:
        return True


async def ask_capabilities(client: ServerClient, *, timeout_s: float) -> Capabilities:
    """Ask a server for the capabilities; generates a token.

    Raises:
        ConfigError: the server lacks a needed endpoint or the extension of the workers.
    """
    try:
        description = await client.get("/openapi.json", timeout_s=timeout_s)
        version = str((await client.get("/version", timeout_s=timeout_s))["version"])
        models = await client.get("/v1/models", timeout_s=timeout_s)
    except (ServerRefusedError, KeyError) as error:
        if isinstance(error, ServerRefusedError) and error.status != 404:
            raise
        raise unfit(f"lacks an endpoint: {error}", f"install vllm=={VLLM.tested_version} in its environment") from error
    for path, remedy in _NEEDED.items():
        if path not in paths_of(description):
            raise unfit(f"has no endpoint {path}", remedy, version=version)
    try:
        ranks = await call_ranks(client, "describe", {}, timeout_s=timeout_s)
    except ServerRefusedError as error:
        raise unfit(f"has no extension of ours ({error.words})", _EXTENSION, version=version) from error
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    body = {"token_ids": [0], "sampling_params": sampling}
    probe = await client.ask("/inference/v1/generate", body, timeout_s=_PROBE_TIMEOUT_S)
    return read_capabilities(version, models, ranks, probe=probe)


def read_capabilities(version: str, models: Json, ranks: list[Any], *, probe: Json) -> Capabilities:
    """Combine GET /v1/models, the description of each rank, and the answer to a request for a token.

    Raises:
        ConfigError: a number is missing, or the extension is of another release of this package.
    """
    try:
        facts = ranks[0]
        if facts["protocol"] != _PROTOCOL:
            raise unfit("has an extension of another release of areal_rloo", _EXTENSION, version=version)
        return Capabilities(
            version=version,
            tensor_parallel=typed(facts["tensor_parallel"], Count, name="tensor_parallel"),
            data_parallel=typed(facts["data_parallel"], Count, name="data_parallel"),
            pipeline_parallel=typed(facts["pipeline_parallel"], Count, name="pipeline_parallel"),
            context_tokens=typed(models["data"][0]["max_model_len"], Count, name="max_model_len"),
            logprobs=str(facts["logprobs"]),
            weight_versions=bool(probe["choices"][0].get("weight_versions")),
            digest=None if facts["quantization"] else "sha256",
        )
    except (KeyError, IndexError, TypeError, AttributeError, EngineError) as error:
        remedy = f"install vllm=={VLLM.tested_version} in its environment"
        raise unfit(f"answers without {error}", remedy, version=version) from error


def check_capabilities(found: Capabilities, *, key: str, tensor_parallel: int, context_tokens: int) -> None:
    """Refuse a server unfit for the config with a ConfigError; the message starts with the config key."""
    said = ", as rollout.tensor_parallel says"
    for size, got, expected, why, remedy in (
        ("data-parallel-size", found.data_parallel, 1, "", "start a server for each copy, and set rollout.num_workers"),
        ("pipeline-parallel-size", found.pipeline_parallel, 1, "", "spread the model with tensor-parallel-size"),
        ("tensor-parallel-size", found.tensor_parallel, tensor_parallel, said, "change either of the two"),
        ("logprobs-mode", found.logprobs, "processed_logprobs", "", "the learner needs those of the sampled tokens"),
    ):
        if got != expected:
            raise ConfigError(f"{key}: expected a server with {size} {expected}{why}, got {got}; {remedy}")
    if found.context_tokens < context_tokens:
        raise ConfigError(
            f"{key}: expected room for {context_tokens} tokens (data.max_prompt_tokens and the longest completion), "
            f"got a server for {found.context_tokens}; ask for less, or start it with a larger --max-model-len"
        )


async def call_ranks(client: ServerClient, method: str, arguments: dict[str, Any], *, timeout_s: float) -> list[Any]:
    """Call a method of our extension on every rank; return the result of each rank.

    Raises:
        ServerRefusedError: the method raised on a rank, or there is no such method.
        ServerGoneError: the server gave no answer.
        EngineError: the results are no list.
    """
    body = {"method": f"areal_{method}", "kwargs": arguments}
    answer = await client.ask("/collective_rpc", body, timeout_s=timeout_s)
    results: list[Any] = typed(answer.get("results", []), list[Any], name="results")
    return results


def unfit(lacks: str, remedy: str, *, version: str = "of unknown version") -> ConfigError:
    return ConfigError(f"rollout.vllm: the server is vLLM {version} and {lacks}; {remedy}")
