"""/metrics over HTTP: clients that send nothing, little or too much cost a bounded share, and keep no scraper out."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from areal_rloo.telemetry import metrics_server
from areal_rloo.telemetry.metrics_server import MOST_CONNECTIONS, serve_metrics


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("areal_rloo_own", "A number", registry=registry).set(32)
    port, stop = serve_metrics(registry, 0)
    yield port
    stop()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def scrape(port: int, address: str = "127.0.0.1") -> str:
    host = f"[{address}]" if ":" in address else address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def ends(connection: socket.socket) -> bool:
    """Wait until the server ends a connection without an answer; fail if it does not."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


LOOPBACKS = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("address", LOOPBACKS)
def test_metrics_are_served_on_a_free_port_until_stopped(address: str) -> None:
    registry = CollectorRegistry()
    Gauge("areal_rloo_own", "A number", registry=registry).set(32)
    port, stop = serve_metrics(registry, 0, address)
    assert "areal_rloo_own 32.0" in scrape(port, address)
    stop()
    with pytest.raises(OSError, match="refused"):
        scrape(port, address)


def test_idle_clients_use_few_threads_and_a_scrape_gets_through(port: int) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(port)).sendall(b"GET /metrics HT")
            assert threading.active_count() <= before + MOST_CONNECTIONS
        assert "areal_rloo_own 32.0" in scrape(port)


def test_the_oldest_of_too_many_connections_is_ended(port: int) -> None:
    with contextlib.ExitStack() as stack:
        oldest, *_ = [stack.enter_context(connect(port)) for _ in range(MOST_CONNECTIONS + 1)]
        assert ends(oldest)


def test_a_client_that_sends_byte_by_byte_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_S", 0.2)
    with connect(port) as client, contextlib.suppress(ConnectionError):
        client.settimeout(0.01)
        while True:
            client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                assert client.recv(1) == b""
                break


def test_a_request_without_an_end_is_ended_early(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_S", 600.0)
    with connect(port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 1_000_000)
        assert ends(client)


def test_clients_that_leave_write_no_record(port: int, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"", b"GET /metrics HT", b"\0\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
        with connect(port) as client:
            client.sendall(sent)
    assert "areal_rloo_own" in scrape(port)
    assert not caplog.messages
