"""The sections `rollout.sglang` and `rollout.vllm`: a server of a rollout worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from areal_rloo.config.section import Natural, Seconds, Section, is_loopback, owned_mistakes, url_mistakes

_SGLANG = {  # options of SGLang set by the package, in every spelling of SGLang
    "host": "the host is 127.0.0.1",
    "port": "the worker takes a free port",
    "api-key": "the worker makes a key for each start",
    "admin-api-key": "the api key gives all rights",
    "config": "the worker writes this file, with the api key; give its options here instead",
    **dict.fromkeys(("model", "model-path"), "set model.path"),
    "device": "set rollout.device",
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "set rollout.tensor_parallel"),
    **dict.fromkeys(("dp", "dp-size", "data-parallel-size"), "raise rollout.num_workers: each worker has a server"),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel-size"), "spread the model with rollout.tensor_parallel"),
    "weight-version": "the value is the policy version",
    "skip-tokenizer-init": "minimum lengths need the tokenizer",
}
_VLLM = {  # options of vLLM set by the package
    "host": "the host is 127.0.0.1",
    "port": "the worker takes a free port",
    "uds": "the host is 127.0.0.1",
    "api-key": "the worker makes a key for each start",
    "config": "the worker writes this file, with the api key; give its options here instead",
    **dict.fromkeys(("model", "model-tag"), "set model.path"),
    **dict.fromkeys(("tensor-parallel-size", "tp"), "set rollout.tensor_parallel"),
    **dict.fromkeys(("data-parallel-size", "dp"), "raise rollout.num_workers: each worker has a server"),
    **dict.fromkeys(("pipeline-parallel-size", "pp"), "spread the model with rollout.tensor_parallel"),
    "api-server-count": "raise rollout.num_workers: each worker has a server",
    **dict.fromkeys(("worker-extension-cls", "middleware"), "the worker names its own, for the weights and the key"),
    **dict.fromkeys(("enable-scale-out", "tokens-only"), "the worker sends and receives token ids"),
    "enable-prompt-tokens-details": "the worker needs the number of cached tokens",
    "logprobs-mode": "the learner needs the logprobs of the sampling distribution",
    "max-logprobs": "the worker asks for the logprob of the sampled token alone",
}
_OWNED = {"sglang": _SGLANG, "vllm": _VLLM}
_SLEEP = dict.fromkeys(("enable-memory-saver", "enable-sleep-mode"), "rollout.share_devices=in_turns needs the sleep")


class ServerConfig(Section, frozen=True):
    """A server for each rollout worker: started by the worker, or already running at one of `urls`."""

    # Interpreter with the server's package; null: this one, else .venv-sglang or .venv-vllm in this folder.
    python: str | None = None
    # More options of the server, by name. true: a bare flag. false or null: remove one of our options.
    arguments: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    urls: tuple[str, ...] = ()  # running servers, as many as rollout workers; empty: the workers start servers
    api_key_env: str | None = None  # environment variable with the key of these servers
    pause: Literal["in_place", "retract"] = "in_place"  # while weights load: keep the cache, or recompute it afterwards
    start_timeout_s: Seconds = 600.0  # limit for the start of a server; large models take minutes
    health_every_s: Seconds = 5.0
    health_timeout_s: Seconds = 30.0  # a server without a good answer for this long counts as hung
    # A request without an answer for this long is aborted, and continues from the tokens so far.
    request_timeout_s: Seconds = 900.0
    max_server_restarts: Natural = 3  # in a row; then the worker exits, and the launcher decides


def server_mistakes(
    engine: str, server: ServerConfig, *, num_workers: int, wire_host: str, transport: str, sleeps: bool
) -> Iterator[str]:
    """Check the section of a server; give the text of each error."""
    key = f"rollout.{engine}"
    owned = _OWNED[engine] | (_SLEEP if sleeps else {})
    yield from owned_mistakes(f"{key}.arguments", server.arguments, owned)
    if not server.urls:
        if server.api_key_env is not None:
            yield f"{key}.api_key_env: nothing reads it without urls; leave it out"
        return
    if num_workers and len(server.urls) != num_workers:
        yield (f"{key}.urls: expected one for each of rollout.num_workers={num_workers}, got {len(server.urls)}")
    if len(set(server.urls)) != len(server.urls):
        yield f"{key}.urls: expected different servers, got {list(server.urls)}"
    for url in server.urls:
        yield from url_mistakes(f"{key}.urls", url)
        if not is_loopback(urlsplit(url).hostname or "") and (is_loopback(wire_host) or transport == "shared_memory"):
            yield (
                f"{key}.urls: {url} is on another machine, which cannot receive weights from wire.host="
                f"{wire_host} by weights.transport={transport}; set wire.host to an address that the machine can "
                "reach, and the transport to collective"
            )
    for option, given in (("python", server.python), ("arguments", server.arguments)):
        if given:
            yield f"{key}.{option}: nothing reads it with urls; leave it out"
