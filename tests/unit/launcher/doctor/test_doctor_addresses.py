"""Servers, services, ports and addresses, each made to fail."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.situations import found, only

from areal_rloo.launcher.doctor import addresses
from areal_rloo.launcher.doctor.addresses import (
    check_host_name,
    check_hub,
    check_metrics_host,
    check_ports,
    check_servers,
    check_wire_host,
)


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


@pytest.mark.parametrize("hangs", ["name", "answer"])
def test_a_silent_hub_is_asked_once_and_for_a_limited_time(hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that drops packets: no error ever comes."""
    monkeypatch.setattr(addresses, "_HUB_S", 0.2)
    asked, ends = [], threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        asked.append(1)
        ends.wait(30)
        return []

    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        if hangs == "name":
            monkeypatch.setattr(socket, "getaddrinfo", hang)
        endpoint = {"name": "http://nobody.invalid", "answer": f"http://127.0.0.1:{server.getsockname()[1]}"}[hangs]
        where = {"HF_ENDPOINT": endpoint, "HF_HOME": "/nowhere"}
        findings = found(check_hub, "model.path=org/name", "data.train.task=gsm8k", "data.eval=null", **where)
        ends.set()
    assert [finding.what.partition(f"{endpoint}: ")[2] for finding in findings] == ["no answer within 0.2 s"] * 2
    assert len(asked) == (hangs == "name")
    assert findings[0].fix == "mend the network, or download it elsewhere and set model.path to its folder"


LATER = "try again later"


@pytest.mark.parametrize(
    ("status", "body", "says", "mend"),
    [
        (200, b"<html>please log in</html>", "wrong", "mend the network"),
        (200, b'{"model_type": "llama"}', "ok", ""),
        (200, b" " * 2**21, "wrong", "mend the network"),
        (404, b"", "wrong", "correct model.path, log in with `hf auth login`"),
        (503, b"", "wrong", LATER),
        (429, b"", "wrong", LATER),
    ],
)
def test_an_answer_of_the_hub_that_is_no_json_is_wrong(status: int, body: bytes, says: str, mend: str) -> None:
    """A network with a login page answers every address with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        finding = only(check_hub, says, "model.path=org/name", HF_ENDPOINT=endpoint, HF_HOME="/nowhere")
        server.shutdown()
    assert says == "ok" or finding.fix == f"{mend}, or download it elsewhere and set model.path to its folder"
