"""The doctor's look at the network between two hosts: a real listener, and others that lie, stall and babble."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from areal_rloo.launcher.findings import Finding, link
from areal_rloo.launcher.findings.link import Greeting, Hello, Stream, reach

REPO = Path(__file__).resolve().parents[3]
DOCTOR = [sys.executable, "-m", "areal_rloo.launcher.doctor"]


@contextmanager
def peer(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of somebody who takes one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError, link.LinkError):  # the other side has seen enough
                behave(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def liar(
    connection: socket.socket,
    *,
    ahead_s: float = 0.0,
    nonce: str | None = None,
    meets: bool = True,
    **says: object,
) -> None:
    """Speaks the protocol, and says what it is told to say."""
    stream = Stream(connection, time.monotonic() + 20)
    hello = msgspec.json.decode(stream.receive_message(), type=Hello)
    with socket.create_server(("127.0.0.1", 0)) as other:
        truth = Greeting(
            nonce=hello.nonce if nonce is None else nonce,
            host="localhost",
            seen_from="127.0.0.1",
            resolved=("127.0.0.1",),
            other_port=other.getsockname()[1],
            versions=link._versions(),
        )
        stream.send_message(msgspec.structs.replace(truth, **says))
        for _ in range(link.NUM_TURNS):
            stream.receive(1)
            stream.send(struct.pack(">d", time.time() + ahead_s))  # noqa: TID251 - a clock is what it lies about
        stream.receive(link.TRANSFER_BYTES)
        stream.send(bytes(link.TRANSFER_BYTES))
        other.settimeout(1 if "other_port" in says else 60)  # where it named another, nobody comes
        second, _ = other.accept()
        with second:
            came = Stream(second, time.monotonic() + 20).receive(16)
            second.sendall(came if meets else bytes(16))


def told(behave: Callable[[socket.socket], None]) -> list[Finding]:
    with peer(behave) as port:
        return list(reach("127.0.0.1", port))


def not_ok(behave: Callable[[socket.socket], None]) -> Finding:
    every = told(behave)
    (finding,) = [finding for finding in every if finding.state != "ok" and "slow" not in finding.what]
    assert finding.fix
    return finding


def test_a_peer_that_says_the_truth_is_ok() -> None:
    every = told(liar)
    assert {finding.state for finding in every if "slow" not in finding.what} == {"ok"}
    assert any("round trip" in finding.what and "from 127.0.0.1" in finding.what for finding in every)


@pytest.mark.parametrize(("ahead_s", "state", "words"), [
    (3600.0, "wrong", "s ahead of this host"),
    (-3600.0, "wrong", "s behind this host"),
    (30.0, "unsure", "s ahead of this host"),
])  # fmt: skip
def test_another_clock_is_told(ahead_s: float, state: str, words: str) -> None:
    finding = not_ok(lambda connection: liar(connection, ahead_s=ahead_s))
    assert (finding.name, finding.state) == ("clock", state)
    assert words in finding.what
    assert "NTP" in finding.fix


def test_a_clock_that_is_no_number_is_an_answer_of_somebody_else() -> None:
    assert "its clock is no number" in not_ok(lambda connection: liar(connection, ahead_s=float("nan"))).what


def test_a_nonce_that_is_not_ours_is_an_answer_of_somebody_else() -> None:
    assert "another nonce" in not_ok(lambda connection: liar(connection, nonce="00" * 16)).what


def test_other_versions_are_wrong() -> None:
    versions = {**link._versions(), "areal-rloo": "9\x1b[31m"}
    finding = not_ok(lambda connection: liar(connection, versions=versions))
    assert finding.state == "wrong"
    assert finding.what.endswith("and 9?[31m there"), "what a stranger says moves no cursor"


def test_translated_addresses_and_names_that_lead_elsewhere_are_doubted() -> None:
    every = told(lambda connection: liar(connection, seen_from="203.0.113.7"))
    doubts = [finding.what for finding in every if finding.state == "unsure" and "slow" not in finding.what]
    assert any("addresses are translated" in what for what in doubts)
    assert any("this host comes from 203.0.113.7" in what for what in doubts)
    finding = not_ok(lambda connection: liar(connection, host="nobody.invalid"))
    assert "nobody.invalid resolves to nothing" in finding.what
    finding = not_ok(lambda connection: liar(connection, host="a b; rm -rf"))
    assert "resolves to nothing" in finding.what, "what is no name is not looked up"


@pytest.mark.parametrize("port", [1, 0, -5, 10**9])
def test_a_port_that_the_kernel_chose_and_nobody_reaches_is_wrong(port: int) -> None:
    finding = not_ok(lambda connection: liar(connection, other_port=port))
    assert finding.state == "wrong"
    assert f"port {port}, which the kernel chose there, cannot be reached" in finding.what


def test_another_port_that_somebody_else_answers_is_wrong() -> None:
    assert "answered by somebody else" in not_ok(lambda connection: liar(connection, meets=False)).what


def _silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def _drips(connection: socket.socket) -> None:
    """A byte now and then: every single read succeeds, and the whole never ends."""
    for byte in struct.pack(">I", 4000) + bytes(4000):
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


@pytest.mark.parametrize("behave", [_silent, _drips])
def test_a_listener_that_never_answers_is_given_up(
    behave: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LOOK_S", 0.3)
    finding = not_ok(behave)
    assert finding.state == "wrong"
    assert "timed out" in finding.what


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it speaks another language"),
        (struct.pack(">I", 2**32 - 1), "it speaks another language"),
        (struct.pack(">I", 3) + b"{{}", "JSON is malformed"),
        (struct.pack(">I", 2) + b"{}", "missing required field"),
        (b"", "it closed the connection"),
    ],
)
def test_somebody_who_speaks_another_language_is_told(said: bytes, words: str) -> None:
    def babble(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(said)

    finding = not_ok(babble)
    assert "not a doctor of this version" in finding.what
    assert words in finding.what
    assert "--listen" in finding.fix


@pytest.mark.parametrize("limit", ["_SLOW_ROUND_TRIP_S", "_SLOW_BYTES_PER_S"])
def test_a_slow_network_is_doubted(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, limit, 0.0 if limit == "_SLOW_ROUND_TRIP_S" else 1e15)
    assert any(finding.state == "unsure" and finding.what.endswith(": slow") for finding in told(liar))


def test_a_port_where_nobody_listens_and_a_name_that_nobody_has_are_told() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        (finding,) = reach("127.0.0.1", closed.getsockname()[1])
    assert "refuses: nothing listens" in finding.what
    (finding,) = reach("nobody.invalid", 1)
    assert "nobody.invalid cannot be resolved" in finding.what


@pytest.fixture
def listening() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A real doctor that listens on every address, and its port."""
    command = [*DOCTOR, "--listen", "0"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("ok      listening: *:"), said
        yield process, int(said.split(";")[0].rpartition(":")[2])
        process.kill()


def test_one_doctor_reaches_another_and_ctrl_c_ends_it(listening: tuple[subprocess.Popen[str], int]) -> None:
    process, port = listening
    done = subprocess.run(
        [*DOCTOR, "--reach", f"127.0.0.1:{port}"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"reach 127.0.0.1:{port}: " in done.stdout
    assert "can be reached too" in done.stdout
    assert process.stdout is not None and process.stderr is not None
    assert "all of it went well" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert process.stderr.read() == ""


def test_a_listener_is_reached_by_ipv6_too(listening: tuple[subprocess.Popen[str], int]) -> None:
    _, port = listening
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        every = list(reach("::1", port))
        assert {f.state for f in every if "slow" not in f.what and "resolves" not in f.what} == {"ok"}
        return
    pytest.skip("no IPv6 here")


@pytest.mark.parametrize("hello", [
    Hello(magic="another doctor", nonce="", host="a"),
    Hello(magic=link._MAGIC, nonce="", host="a b; rm -rf"),
])  # fmt: skip
def test_a_visitor_of_another_version_or_without_a_name_is_sent_away(
    hello: Hello, listening: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = listening
    with socket.create_connection(("127.0.0.1", port)) as connection:
        stream = Stream(connection, time.monotonic() + 20)
        stream.send_message(hello)
        with pytest.raises((link.LinkError, ConnectionError)):
            stream.receive(1)
    assert process.stdout is not None
    assert "it is no doctor of this version" in process.stdout.readline()


def test_visitors_that_babble_or_stall_do_not_hold_up_the_next(listening: tuple[subprocess.Popen[str], int]) -> None:
    process, port = listening
    assert process.stdout is not None
    with socket.create_connection(("127.0.0.1", port)):  # says nothing, and stays
        with socket.create_connection(("127.0.0.1", port)) as babbler:
            babbler.sendall(os.urandom(64))
            babbler.shutdown(socket.SHUT_WR)
            assert process.stdout.readline().startswith("unsure  visitor 127.0.0.1: ")
            assert "fix:" in process.stdout.readline()
        every = list(reach("127.0.0.1", port))
    assert {finding.state for finding in every if "slow" not in finding.what and "resolves" not in finding.what} == {
        "ok"
    }
