"""Strangers at /metrics: any user of the host can connect there. They are counted, bounded, and in no log."""

import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from support.patience import PATIENCE_S, eventually

from areal_rloo.config import load_config
from areal_rloo.telemetry import scrapes
from areal_rloo.telemetry.scrapes import serve_metrics
from areal_rloo.telemetry.targets import Targets


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("areal_rloo_own", "A number of ours", registry=registry).set(7.0)
    port, stop = serve_metrics(registry, 0)
    yield port
    stop()


def _scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_any_process_names_all_processes_of_the_run(tmp_path: Path) -> None:
    """In the form of `http_sd_configs`, for a Prometheus that does not see the folder."""
    targets = Targets(load_config("quickstart.yaml", [f"telemetry.targets_folder={tmp_path}"]), tmp_path / "run")
    port, stop = serve_metrics(CollectorRegistry(), 0, groups=targets.groups)
    targets.add("learner", port)
    targets.add("rollout-0", 9401)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/targets", timeout=PATIENCE_S) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            found = json.load(answer)
        assert _scraped(port)["areal_rloo_scrape_refused_total"] == 0.0
    finally:
        stop()
    labels = {"run": "run", "run_id": found[0]["labels"]["run_id"]}
    assert found == [
        {"targets": [f"127.0.0.1:{port}"], "labels": {**labels, "process": "learner"}},
        {"targets": ["127.0.0.1:9401"], "labels": {**labels, "process": "rollout-0"}},
    ]


def _refused(port: int) -> float:
    return _scraped(port)["areal_rloo_scrape_refused_total"]


@pytest.mark.parametrize("sent", [b"\xff" + bytes(range(255)), b"GET\n", b"\r\n" * 3, b"G" * 100_000, b""])
def test_bytes_that_are_no_request_are_counted_and_printed_nowhere(
    port: int, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(ConnectionError):
            stranger.sendall(sent)
    eventually(lambda: _refused(port) >= 3, "strangers are counted")
    assert _scraped(port)["areal_rloo_own"] == 7.0
    assert capfd.readouterr() == ("", "")


def test_connections_without_end_leave_room_for_a_scrape(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as strangers:
        for _ in range(5 * scrapes.MOST_CONNECTIONS):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert _refused(port) >= 3 * scrapes.MOST_CONNECTIONS
    assert capfd.readouterr() == ("", "")


def test_a_request_that_never_ends_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes.Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET /metrics HTTP/1.1\r\n")
        stranger.settimeout(PATIENCE_S)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert _refused(port) == 1
