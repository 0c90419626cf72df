"""Checks of addresses: ports, the wire's host, this host's name, servers of engines, reward services."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from areal_rloo.config import Config, ServerConfig, is_loopback
from areal_rloo.decoding import from_json
from areal_rloo.engines.installed import ServerPackage, package_of
from areal_rloo.errors import ConfigError, DataError, DecodeError, first_line
from areal_rloo.launcher.doctor.base import Finding, Situation, ok, unsure, wrong
from areal_rloo.rewards import reward_parts
from areal_rloo.waiting import call_within, on_daemon_thread

_ANSWER_S = 5.0
_SILENCE_S = 10.0  # ends the thread of a question, when the caller has gone on
_SHARE = "rollout.max_reward_failure_share"
_MOST_ANSWER_BYTES = 2**20


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
    """Connect to all running servers of engines and all reward services at the same time.

    A server may start later, so each finding says how a run goes on without an answer.
    """
    rollout, services = situation.config.rollout, list(_services(situation.config))
    connections = [on_daemon_thread(partial(_no_connection, url), name=url) for url in services]
    if rollout.engine != "embedded" and rollout.server is not None:
        yield from _engine_findings(package_of(rollout.engine), rollout.server, situation.environment)
    ends = f"a run drops each completion without a reward, and ends above {_SHARE}={rollout.max_reward_failure_share:g}"
    for url, connection in zip(services, connections, strict=True):
        yield _finding("rewards", url, connection.result(), ends)


def _engine_findings(package: ServerPackage, server: ServerConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Ask as an engine asks: with the key, for the label of the weights and then for the health."""
    token = environment.get(server.api_key_env or "")
    asked = [on_daemon_thread(partial(_no_engine, url, package, token), name=url) for url in server.urls]
    for url, answer in zip(server.urls, asked, strict=True):
        trouble = answer.result()
        if trouble is not None and trouble.status in (401, 403):
            what, key = f"{url}: {trouble.words}: the server refuses the key; a run ends", f"{package.key}.api_key_env"
            yield wrong(key, what, "name the environment variable with the server's key", ConfigError)
        elif trouble is not None and trouble.status == 404:  # see `ServerKind.label`
            yield _finding(f"{package.key}.urls", url, trouble, f"a run ends, as this is no {package.name} that fits")
        else:
            waits = f"a run waits, and ends after {package.key}.start_timeout_s={server.start_timeout_s:g} s"
            yield _finding(f"{package.key}.urls", url, trouble, waits)


def _finding(key: str, url: str, trouble: Trouble | None, run: str) -> Finding:
    if trouble is None:
        return ok(key, f"{url} answers")
    return wrong(key, f"{url}: {trouble.words}; {run}", "start the server, or correct the url", ConfigError)


def _services(config: Config) -> Iterator[str]:
    try:
        yield from dict.fromkeys(part.config.url for part in reward_parts(config.data) if part.config.url is not None)
    except DataError:
        return  # `check_data_files` reports the error


def _no_connection(url: str) -> Trouble | None:
    """Connect to a service; give the reason of a failure, or None."""
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        call_within(_ANSWER_S, lambda: socket.create_connection(address, timeout=_ANSWER_S).close())
    except OSError as error:
        return Trouble(_plain(error))
    return None


def _no_engine(url: str, package: ServerPackage, token: str | None) -> Trouble | None:
    direct = (urllib.request.ProxyHandler({}), _NoRedirects())
    label = Question(f"{url.rstrip('/')}{package.label}", token, direct)
    health = Question(f"{url.rstrip('/')}{package.health}", token, direct, wants_json=False)
    return no_answer(label, health, within_s=_ANSWER_S)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse every redirect: the API key is for this server."""


class Trouble(NamedTuple):
    """Why a server gave no answer; `status` of HTTP, if it gave one."""

    words: str
    status: int | None = None


class Question(NamedTuple):
    """A GET, answered by a JSON object if `wants_json`. `handlers` are of urllib, besides its own."""

    url: str
    token: str | None
    handlers: tuple[urllib.request.BaseHandler, ...] = ()
    wants_json: bool = True


def no_answer(*questions: Question, within_s: float) -> Trouble | None:
    """Ask in turn; give the reason of the first failure, or None.

    `within_s` limits the names, the connections and the answers together.
    """
    try:
        return call_within(within_s, lambda: next(filter(None, map(_trouble, questions)), None))
    except TimeoutError as error:
        return Trouble(str(error))


def _trouble(question: Question) -> Trouble | None:
    token = question.token
    if token and not (token.isascii() and token.isprintable()):  # the error of http.client shows the key
        return Trouble("the key has characters that HTTP does not allow")
    try:
        asked = urllib.request.Request(question.url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.build_opener(*question.handlers).open(asked, timeout=_SILENCE_S) as answer:
            words = _no_json(answer) if question.wants_json else ""
            return Trouble(words) if words else None
    except urllib.error.HTTPError as error:
        with error:
            return Trouble(f"HTTP {error.code}", error.code)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return Trouble(_plain(error))


def _plain(error: Exception) -> str:
    """Return the reason of a failure without the classes of Python."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, socket.gaierror):
        return f"no address for this host ({reason.strerror})"
    return reason if isinstance(reason, str) else first_line(reason)


def _no_json(answer: http.client.HTTPResponse) -> str:
    """Read an answer; say why it is no JSON object, or give an empty string. A network may answer with a page."""
    body = answer.read(_MOST_ANSWER_BYTES + 1)
    if len(body) > _MOST_ANSWER_BYTES:
        return f"the answer has more than {_MOST_ANSWER_BYTES:,} bytes"
    try:
        from_json(body, dict[str, Any])
    except DecodeError:
        return "the answer is no JSON object; the network may ask for a login"
    return ""
