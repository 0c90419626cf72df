"""The sections `rollout.sglang` and `rollout.vllm`: a server of a rollout worker."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from areal_rloo.config.section import (
    Natural,
    Seconds,
    Section,
    argument_name,
    is_loopback,
    owned_mistakes,
    url_mistakes,
)
from areal_rloo.errors import shown

_EVERY = {  # of both
    "dtype": "set model.dtype",
    **dict.fromkeys(("tokenizer", "tokenizer-path"), "the tokenizer is that of model.path"),
    "load-format": "the weights are those of model.path",
}
_SGLANG = {  # options of SGLang set by the package, in every spelling of SGLang
    "host": "the host is 127.0.0.1",
    "port": "the worker takes a free port",
    "api-key": "the worker makes a key for each start",
    "admin-api-key": "the api key gives all rights",
    "config": "the worker writes this file, with the api key; give its options here instead",
    **dict.fromkeys(("model", "model-path"), "set model.path"),
    "device": "set rollout.device",
    **_EVERY,
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr"), "a server runs on a single host"),
    **dict.fromkeys(("base-gpu-id", "gpu-id-step"), "the launcher gives each server its GPUs"),
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
    **_EVERY,
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port"), "a server runs on a single host"),
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
_FRACTIONS = {"mem-fraction-static": 0.999, "gpu-memory-utilization": 1.0}  # most; the plan of the memory counts them
_NUMBERS = ("max-total-tokens", "kv-cache-memory-bytes")
_CONTEXT: dict[str, tuple[str, ...]] = {"context-length": (), "max-model-len": ("-1", "auto")}  # and words for it
_RESERVED = {"context-length": 5, "max-model-len": 0}  # tokens that the server keeps for itself
_EXPONENT = re.compile(r".*[.eE]\d+")  # no server reads this as a whole number
_SUFFIXES: dict[str, dict[str, int | float]] = {  # of numbers; a whole factor needs a whole number
    "sglang": {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
    "vllm": {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
}
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
    health_every_s: Seconds = 5.0  # interval between requests of the health of a server
    health_timeout_s: Seconds = 30.0  # a server without a good answer for this long counts as hung
    # A request without an answer for this long is aborted, and continues from the tokens so far.
    request_timeout_s: Seconds = 900.0
    max_server_restarts: Natural = 3  # in a row; then the worker exits, and the launcher decides


_Place = tuple[str, str, int, str]


def _place(url: str) -> _Place:
    """Return scheme, host, port and path of a URL in a single spelling."""
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, "localhost" if host in ("127.0.0.1", "::1") else host, port, parts.path.rstrip("/")


def server_mistakes(
    engine: str,
    server: ServerConfig,
    *,
    num_workers: int,
    wire_host: str,
    transport: str,
    sleeps: bool,
    context_tokens: int,
) -> Iterator[str]:
    """Check the section of a server; give the text of each error."""
    key = f"rollout.{engine}"
    owned = _OWNED[engine] | (_SLEEP if sleeps else {})
    yield from owned_mistakes(f"{key}.arguments", server.arguments, owned)
    yield from _number_mistakes(engine, server, context_tokens)
    if not server.urls:
        if server.api_key_env is not None:
            yield f"{key}.api_key_env: nothing reads it without urls; leave it out"
        return
    if num_workers and len(server.urls) != num_workers:
        yield (f"{key}.urls: expected one for each of rollout.num_workers={num_workers}, got {len(server.urls)}")
    seen: dict[_Place, str] = {}
    for url in server.urls:
        instead = f"and name the environment variable with the server's key in {key}.api_key_env"
        yield from url_mistakes(f"{key}.urls", url, instead=instead)
        if "?" in url:  # the client adds the paths of the calls at the end
            yield f"{key}.urls: expected a URL without a query, got '{shown(url)}'; leave out '?' and the rest"
        if (place := _place(url)) in seen:
            yield f"{key}.urls: expected different servers, got {seen[place]} and {url}, the same server; name another"
        seen[place] = url
        if not is_loopback(urlsplit(url).hostname or "") and (is_loopback(wire_host) or transport == "shared_memory"):
            yield (
                f"{key}.urls: {url} is on another machine, which cannot receive weights from wire.host="
                f"{wire_host} by weights.transport={transport}; set wire.host to an address that the machine can "
                "reach, and the transport to collective"
            )
    for option, given in (("python", server.python), ("arguments", server.arguments)):
        if given:
            yield f"{key}.{option}: nothing reads it with urls; leave it out"


def option_number(engine: str, value: object) -> float:
    """Read a number as a server reads it, with a suffix: for vLLM 25.6k is 25,600, and 25K is 25 * 1,024.

    NaN for all else, and for an engine that is no server only numbers without a suffix.
    """
    found = re.fullmatch(r"\s*([^A-Za-z\s]*|\S*\d)([A-Za-z]*)\s*", "" if isinstance(value, bool) else str(value))
    number, suffix = ("", "") if found is None else found.groups()
    factor = _SUFFIXES.get(engine, {}).get(suffix, math.nan) if suffix else 1.0
    if isinstance(factor, int) and not number.isdigit():
        return math.nan
    try:
        return float(number) * factor
    except ValueError:
        return math.nan


def _number_mistakes(engine: str, server: ServerConfig, context_tokens: int) -> Iterator[str]:
    """Check the options with which the launcher plans; a server would refuse them only after its start."""
    for written, value in server.arguments.items():
        if value is None or value is False:
            continue  # left out
        name, number, expected = argument_name(written), option_number(engine, value), ""
        is_whole = number.is_integer() and not (isinstance(value, str) and _EXPONENT.fullmatch(value))
        least = context_tokens + _RESERVED.get(name, 0)
        if name in _FRACTIONS and not 0 < number <= _FRACTIONS[name]:
            expected = "a number between 0 and 1"
        elif name in _NUMBERS and not (is_whole and number > 0):
            expected = "a whole number above 0"
        elif name in _CONTEXT and str(value) not in _CONTEXT[name] and not (is_whole and number >= least):
            expected = f"at least {least}: data.max_prompt_tokens, the longest completion and the server's own"
        if expected:
            yield f"rollout.{engine}.arguments.{written}: expected {expected}, got {value}"
