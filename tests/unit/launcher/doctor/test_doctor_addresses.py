"""Servers, services, ports and addresses, each made to fail."""

import asyncio
import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Literal

import pytest
from support.http_servers import serving
from support.situations import found, only

from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server.client import ServerClient
from areal_rloo.errors import EngineError, UserError
from areal_rloo.launcher.doctor import addresses
from areal_rloo.launcher.doctor.addresses import (
    check_host_name,
    check_metrics_host,
    check_ports,
    check_servers,
    check_wire_host,
)

KEY = "a-secret-of-a-test"


def test_silent_servers_and_services_are_wrong(server: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        urls = ("rollout.engine=sglang", "rollout.num_workers=2", f"rollout.sglang.urls=[{server}, {dead}]")
        answered, refused = found(check_servers, *urls)
        assert (answered.state, refused.state) == ("ok", "wrong")
        assert dead in refused.what and "refused" in refused.what
        rewards = f"data.train.rewards=[{{url: {dead}/score}}]"
        assert only(check_servers, "wrong", rewards).name == "rewards"


def test_a_server_that_answers_slowly_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time; the answer as a whole does not."""
    monkeypatch.setattr(addresses, "_ANSWER_S", 0.3)

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            for _ in range(50):
                connection.sendall(b"z")
                time.sleep(0.1)
            connection.sendall(b"\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        finding = only(check_servers, "wrong", "rollout.engine=sglang", f"rollout.sglang.urls=[{url}]")
    assert finding.what.startswith(f"{url}: no answer within 0.3 s")


def test_all_servers_are_asked_at_the_same_time() -> None:
    everyone = threading.Barrier(3)

    class Together(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            everyone.wait(timeout=30)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    with serving(Together) as address:
        urls = ", ".join(f"{address}/{name}" for name in "abc")
        asked = ("rollout.engine=sglang", "rollout.num_workers=3", f"rollout.sglang.urls=[{urls}]")
        states = [finding.state for finding in found(check_servers, *asked)]
    assert states == ["ok"] * 3


async def _engine_accepts(engine: Literal["sglang", "vllm"], url: str) -> bool:
    """Ask as an engine does at its start."""
    kind, client = kind_of(engine), ServerClient(url, api_key=KEY)
    try:
        await kind.label(client, timeout_s=10.0)
        await client.text(kind.package.health, timeout_s=10.0)
    except (UserError, EngineError):
        return False
    finally:
        await client.close()
    return True


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("only with the key", None),
        ("only with another key", "HTTP 401: the server refuses the key; a run ends"),
        ("with a redirect", "HTTP 302; a run waits, and ends after"),
        ("with a page", "the answer is no JSON object"),
        ("with nothing of an engine", "HTTP 404; a run ends"),
    ],
)
def test_a_server_is_asked_as_the_engine_asks(
    engine: Literal["sglang", "vllm"], answers: str, words: str | None
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 200
            if answers.startswith("only"):
                expected = KEY if answers == "only with the key" else "another"
                status = 200 if self.headers["Authorization"] == f"Bearer {expected}" else 401
            elif answers == "with a redirect" and not self.path.startswith("/there"):
                status = 302
            elif answers == "with nothing of an engine" and self.path != "/health":
                status = 404
            self.send_response(status)
            self.send_header("Location", f"/there{self.path}")
            self.end_headers()
            self.wfile.write(b"<html>" if answers == "with a page" else b'{"weight_version": "3"}')

        do_POST = do_GET  # noqa: N815 - a name of http.server

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        options = (f"rollout.{engine}={{urls: ['{url}'], api_key_env: MY_KEY}}", f"rollout.engine={engine}")
        (finding,) = found(check_servers, *options, MY_KEY=KEY)
        accepted = asyncio.run(_engine_accepts(engine, url))
    assert (finding.state, accepted) == (("wrong", False) if words else ("ok", True))
    assert (words or "answers") in finding.what


def test_a_key_that_no_header_can_carry_is_not_shown() -> None:
    options = ("rollout.engine=vllm", "rollout.vllm={urls: ['http://127.0.0.1:1'], api_key_env: MY_KEY}")
    finding = only(check_servers, "wrong", *options, MY_KEY=f"{KEY}\n")
    assert "characters that HTTP does not allow" in finding.what and KEY not in finding.what


def test_a_port_in_use_is_wrong_also_for_a_worker() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert only(check_ports, "wrong", f"wire.port={port}").what.startswith(
            f"port {port} is in use (Address already"
        )
        _, second = found(check_ports, f"telemetry.metrics_port={port - 1}")
        assert second.state == "wrong" and str(port) in second.what


def test_the_metrics_port_is_checked_on_the_metrics_host() -> None:
    with socket.socket() as taken:
        for number in range(20_000, 30_000):  # below the ports that connections of other tests get
            with contextlib.suppress(OSError), socket.socket() as free:
                free.bind(("127.0.0.1", number))
                taken.bind(("127.0.0.2", number))
                break
        taken.listen()
        port = f"telemetry.metrics_port={number}"
        assert [finding.state for finding in found(check_ports, port)] == ["ok", "ok"]
        elsewhere, _ = found(check_ports, port, "telemetry.metrics_host=127.0.0.2")
        assert elsewhere.state == "wrong"


def test_a_wire_host_of_another_host_is_wrong() -> None:
    assert "is no address of this host" in only(check_wire_host, "wrong", "wire.host=203.0.113.7").what
    assert only(check_wire_host, "unsure", "wire.host=0.0.0.0")
    for good in ("127.0.0.1", "localhost", *(["::1"] if socket.has_dualstack_ipv6() else [])):
        assert found(check_wire_host, f"wire.host={good}") == []
    said = only(check_wire_host, "wrong", "wire.host=nobody.invalid").what
    assert said.startswith("nobody.invalid is a name without an IPv4 address here")


def test_a_metrics_host_of_another_host_is_wrong() -> None:
    for foreign in ("203.0.113.7", "nobody.invalid", "2001:db8::7"):
        said = only(check_metrics_host, "wrong", f"telemetry.metrics_host={foreign}").what
        assert said.startswith(f"{foreign} is no address of this host (")
    for good in ("127.0.0.1", "localhost", "0.0.0.0", *(["::1", "'::'"] if socket.has_dualstack_ipv6() else [])):
        assert found(check_metrics_host, f"telemetry.metrics_host={good}") == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this host")
def test_a_port_of_an_ipv6_address_in_use_is_wrong() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        assert only(check_ports, "wrong", f"wire.port={port}", "wire.host=::1").name == "wire.port"


def test_a_host_without_an_own_address_is_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert "no other host can connect to" in only(check_host_name, "unsure").what
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    assert "cannot be resolved" in only(check_host_name, "unsure").what
