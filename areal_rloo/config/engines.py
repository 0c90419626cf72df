"""Options of the engines that a rollout worker can drive, one section each."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from areal_rloo.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from areal_rloo.errors import ConfigError

if TYPE_CHECKING:
    from areal_rloo.config.schema import RolloutConfig

# What we set ourselves, by every spelling SGLang knows, and where the user says it instead.
_OWNED = {
    "host": "it is 127.0.0.1",
    "port": "it is a free one",
    "api-key": "it is made for each start",
    "admin-api-key": "the api key opens all",
    "config": "it carries the api key; write its options here instead",
    "model": "set model.path",
    "model-path": "set model.path",
    "device": "set rollout.device",
    "tp": "set rollout.tensor_parallel",
    "tp-size": "set rollout.tensor_parallel",
    "tensor-parallel-size": "set rollout.tensor_parallel",
    "dp": "raise rollout.num_workers: each has a server of its own",
    "dp-size": "raise rollout.num_workers: each has a server of its own",
    "data-parallel-size": "raise rollout.num_workers: each has a server of its own",
    "pp": "spread the model with rollout.tensor_parallel",
    "pp-size": "spread the model with rollout.tensor_parallel",
    "pipeline-parallel-size": "spread the model with rollout.tensor_parallel",
    "weight-version": "it is the policy version",
    "skip-tokenizer-init": "minimum lengths need the tokenizer",
}


class EmbeddedConfig(Section, frozen=True):
    """The embedded engine. Evaluation takes its rows from the same cache, and beside it a copy of the weights."""

    # Tokens whose keys and values fit, of all completions together; a single one may take them all. When they do not
    # fit any more, the completion submitted last waits and is computed again. null: num_slots whole contexts and a
    # quarter more, as far as half of the memory goes that is free once the weights are there.
    cache_tokens: PositiveInt | None = None
    prefill_chunk_tokens: PositiveInt = 512  # of prompts computed between two decode steps while others decode


class SGLangConfig(Section, frozen=True):
    """An SGLang server for each rollout worker: started by the worker, or running already at one of `urls`."""

    python: str | None = None  # that has sglang; null: ours where it has, else .venv-sglang/bin/python of this folder
    # More of the server's own options, by their names: true is a bare flag, false and null leave one of ours out.
    arguments: dict[str, str | int | float | bool | None] = msgspec.field(default_factory=dict)
    urls: tuple[str, ...] = ()  # of servers that run already, one for each rollout worker; empty: we start them
    api_key_env: str | None = None  # name of the environment variable that has the key of these servers
    pause: Literal["in_place", "retract"] = "in_place"  # while weights load: keep the cache, or compute it again after
    start_timeout_s: PositiveFloat = 600.0  # until a server answers; large models take minutes
    health_every_s: PositiveFloat = 5.0
    health_timeout_s: PositiveFloat = 30.0  # without a good answer for so long a server counts as hung
    max_server_restarts: NonNegativeInt = 3  # in a row; then the worker ends, and its launcher decides


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def argument_name(written: str) -> str:
    """An option as SGLang's command line spells it: `--tp_size`, `tp_size` and `tp-size` are one."""
    return written.lstrip("-").replace("_", "-")


def refuse_owned(key: str, arguments: Iterable[str], owned: Mapping[str, str]) -> None:
    """Refuse what we say to another program ourselves.

    Args:
        key: of the options.
        arguments: as they are written.
        owned: by the name of an option, where the user says it instead.

    Raises:
        ConfigError: names the option.
    """
    for written in arguments:
        name = argument_name(written)
        if name in owned:
            raise ConfigError(f"{key}.{written}: not an option here: {owned[name]}")


def validate_engines(rollout: RolloutConfig, *, context_tokens: int, wire_host: str, transport: str) -> None:
    """Check what no single field can check.

    Args:
        rollout: the section.
        context_tokens: of the run's longest prompt and completion together.
        wire_host: wire.host, the learner's address.
        transport: weights.transport.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    sglang = rollout.sglang
    if rollout.engine != "sglang":
        if rollout.tensor_parallel != 1:
            raise ConfigError(
                f"rollout.tensor_parallel: expected 1 with rollout.engine=embedded, got {rollout.tensor_parallel}; "
                "set rollout.engine=sglang"
            )
        _validate_embedded(rollout.embedded, context_tokens)
        return
    refuse_owned("rollout.sglang.arguments", sglang.arguments, _OWNED)
    _validate_urls(rollout, wire_host=wire_host, transport=transport)


def _validate_embedded(embedded: EmbeddedConfig, context_tokens: int) -> None:
    if embedded.cache_tokens is not None and embedded.cache_tokens < context_tokens:
        raise ConfigError(
            f"rollout.embedded.cache_tokens: expected at least data.max_prompt_tokens and the longest completion "
            f"together = {context_tokens}, got {embedded.cache_tokens}; raise it, or set null for the default"
        )


def _validate_urls(rollout: RolloutConfig, *, wire_host: str, transport: str) -> None:
    sglang = rollout.sglang
    if not sglang.urls:
        if sglang.api_key_env is not None:
            raise ConfigError("rollout.sglang.api_key_env: nothing reads it without urls; leave it out")
        return
    if rollout.num_workers and len(sglang.urls) != rollout.num_workers:
        raise ConfigError(
            f"rollout.sglang.urls: expected one for each of rollout.num_workers={rollout.num_workers}, "
            f"got {len(sglang.urls)}"
        )
    if len(set(sglang.urls)) != len(sglang.urls):
        raise ConfigError(f"rollout.sglang.urls: expected different servers, got {list(sglang.urls)}")
    for url in sglang.urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.sglang.urls: expected http://HOST:PORT, got '{url}'")
        if not is_loopback(urlsplit(url).hostname or "") and (is_loopback(wire_host) or transport == "shared_memory"):
            raise ConfigError(
                f"rollout.sglang.urls: {url} is on another machine, and weights would come from wire.host={wire_host} "
                f"by weights.transport={transport}; set wire.host to an address it can reach, and the transport to "
                "collective"
            )
    for key, given in (("python", sglang.python), ("arguments", sglang.arguments)):
        if given:
            raise ConfigError(f"rollout.sglang.{key}: nothing reads it with urls; leave it out")
