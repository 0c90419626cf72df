"""Checks of addresses: ports, the wire's host, this host's name, servers of engines, reward services, the hub."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from areal_rloo.config import Config, is_loopback
from areal_rloo.errors import ConfigError, DataError, first_line
from areal_rloo.launcher.doctor.base import Finding, Situation, ok, unsure, wrong
from areal_rloo.launcher.doctor.inputs import missing_datasets, model_paths, offline_variable
from areal_rloo.models.folder import cached_folder, is_hub_name
from areal_rloo.rewards import reward_parts
from areal_rloo.waiting import call_within

_ANSWER_S = 5.0
_HUB_S = 3.0  # a start without a network ends within 5 s
_MOST_ANSWER_BYTES = 2**20
_HUB = "https://huggingface.co"
_REFUSALS = (401, 403, 404)  # HTTP: no such name, or none for this user


def check_ports(situation: Situation) -> Iterator[Finding]:
    """Check for ports of the config in use. All other ports of a run are chosen among free ones."""
    for key, host, port in _ports(situation.config):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host if is_loopback(host) else "", port))
                yield ok(key, f"port {port} is free")
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else "above 65535"
                yield wrong(key, f"port {port} is in use ({reason})", "choose another, or 0")


def _ports(config: Config) -> Iterator[tuple[str, str, int]]:
    if config.wire.port:
        yield "wire.port", config.wire.host, config.wire.port
    if config.telemetry.metrics_port:
        for index in range(1 + config.rollout.num_workers):
            yield "telemetry.metrics_port", config.telemetry.metrics_host, config.telemetry.metrics_port + index


def check_wire_host(situation: Situation) -> Iterator[Finding]:
    """Compare wire.host with the addresses of this host."""
    host = situation.config.wire.host
    fix = "set wire.host to an address that `ip address` shows on the learner's host"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        yield from _name_findings(host, fix)
        return
    if address.is_unspecified:
        yield unsure("wire.host", f"{host} is no address that workers on other hosts can connect to", fix)
        return
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            yield wrong("wire.host", f"{host} is no address of this host ({error.strerror})", fix)


def check_metrics_host(situation: Situation) -> Iterator[Finding]:
    """Bind telemetry.metrics_host, as the learner and the workers will."""
    host = situation.config.telemetry.metrics_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = call_within(_ANSWER_S, lambda: socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM))
        with socket.socket(family) as probe:
            probe.bind(found[0][4])
    except OSError as error:
        fix = "set telemetry.metrics_host to an address that `ip address` shows here, or to 0.0.0.0 for all"
        yield wrong("telemetry.metrics_host", f"{host} is no address of this host ({first_line(error)})", fix)


def _name_findings(name: str, fix: str) -> Iterator[Finding]:
    """Look up a name: ZeroMQ takes the IPv4 address."""
    try:
        call_within(_ANSWER_S, lambda: socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM))
    except OSError as error:
        yield wrong("wire.host", f"{name} is a name without an IPv4 address here: {first_line(error)}", fix)


def check_host_name(situation: Situation) -> Iterator[Finding]:
    """Look up this host's own name: ranks of a collective send their names to each other."""
    name = socket.gethostname()
    fix = f"put {name} with its real address into /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        found = call_within(_ANSWER_S, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError as error:
        yield unsure("host name", f"{name} cannot be resolved here: {first_line(error)}", fix)
        return
    addresses = tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    if all(is_loopback(address) for address in addresses):
        what = f"{name} is {', '.join(addresses)} here, an address that no other host can connect to"
        yield unsure("host name", what, f"{fix}; a run on this host alone is not affected")
    else:
        yield ok("host name", f"{name} is {', '.join(addresses)}")


def check_servers(situation: Situation) -> Iterator[Finding]:
    """Connect to running servers of engines and reward services."""
    config = situation.config
    key = f"rollout.{config.rollout.engine}.urls"
    for url in config.rollout.server_urls:
        if trouble := _no_answer(f"{url.rstrip('/')}/health"):
            yield wrong(
                f"rollout.{config.rollout.engine}.urls",
                f"{url}: {trouble.words}",
                "start the server, or correct the url",
                ConfigError,
            )
        else:
            yield ok(key, f"{url} answers")
    try:
        services = dict.fromkeys(part.config.url for part in reward_parts(config.data) if part.config.url is not None)
    except DataError:
        return  # `check_data_files` reports the error
    for url in services:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=_ANSWER_S).close()
            yield ok("rewards", f"{url} accepts connections")
        except OSError as error:
            yield wrong("rewards", f"{url}: {first_line(error)}", "start the service, or correct the url")


def check_hub(situation: Situation) -> Iterator[Finding]:
    """Ask the hub for access to each model and dataset not downloaded yet: a run without them would fail."""
    if offline_variable(situation) is not None:
        return
    base, token = situation.environment.get("HF_ENDPOINT", _HUB).rstrip("/"), situation.environment.get("HF_TOKEN")
    silent: _Trouble | None = None  # then nothing more is asked

    def ask(path: str) -> _Trouble | None:
        nonlocal silent
        trouble = silent or _no_answer_of_hub(f"{base}/{path}", token)
        silent = trouble if trouble is not None and trouble.status is None else None
        return trouble

    for key, path in (*model_paths(situation.config), *_reward_models(situation.config)):
        cached = cached_folder(path, situation.environment) is not None
        if path == "tiny" or Path(path).exists() or not is_hub_name(path) or cached:
            continue
        if trouble := ask(f"{path}/resolve/main/config.json"):
            fix = f"{_mend(key, trouble)}, or download it elsewhere and set {key} to its folder"
            yield wrong(key, f"{path}: {base}: {trouble.words}", fix)
        else:
            yield ok(key, f"{path}: {base} has it")
    for key, path in missing_datasets(situation):
        if trouble := ask(f"api/datasets/{path}"):
            fix = f"{_mend(key, trouble)}, or set {key} to a local file"
            yield wrong(key, f"{path}: {base}: {trouble.words}", fix, DataError)
        else:
            yield ok(key, f"{path}: {base} has it")


def _mend(key: str, trouble: _Trouble) -> str:
    if trouble.status is None:
        return "mend the network"
    return f"correct {key}, log in with `hf auth login`" if trouble.status in _REFUSALS else "try again later"


def _reward_models(config: Config) -> Iterator[tuple[str, str]]:
    try:
        for part in reward_parts(config.data):
            if part.config.model is not None:
                yield f"{part.key}.model", part.config.model
    except DataError:
        return  # `check_data_files` reports the error


class _Trouble(NamedTuple):
    """Why a server gave no answer; `status` of HTTP, if it gave one."""

    words: str
    status: int | None = None


def _no_answer_of_hub(url: str, token: str | None) -> _Trouble | None:
    """Ask the hub; one limit for the name, the connection and the answer."""
    try:
        return call_within(_HUB_S, lambda: _no_answer(url, token=token, of_hub=True))
    except TimeoutError as error:
        return _Trouble(str(error))


def _no_answer(url: str, *, token: str | None = None, of_hub: bool = False) -> _Trouble | None:
    """Send a GET; give the reason of a failure, or None. The hub is asked through proxies, for JSON."""
    handlers = [] if of_hub else [urllib.request.ProxyHandler({})]
    try:
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.build_opener(*handlers).open(asked, timeout=_ANSWER_S) as answer:
            words = _no_json(answer) if of_hub else ""
            return _Trouble(words) if words else None
    except urllib.error.HTTPError as error:
        with error:
            return _Trouble(f"HTTP {error.code}", error.code)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _Trouble(first_line(error))


def _no_json(answer: http.client.HTTPResponse) -> str:
    """Read an answer of the hub; say why it is no JSON, or give an empty string. A network may answer with a page."""
    body, ends_s = b"", time.monotonic() + _ANSWER_S
    while part := answer.read1(_MOST_ANSWER_BYTES):
        body += part
        if time.monotonic() > ends_s or len(body) > _MOST_ANSWER_BYTES:
            return f"no whole answer within {_ANSWER_S:g} s and {_MOST_ANSWER_BYTES:,} bytes"
    try:
        json.loads(body)
    except ValueError:
        return "the answer is no JSON; the network may ask for a login"
    return ""
