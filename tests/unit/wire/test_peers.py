"""The limits of a peer: far above an honest worker, and bounded memory for peers that come and go."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from areal_rloo.wire import peers
from areal_rloo.wire.peers import MOST_OFFENCES, MOST_PEERS, Allowances, Laps, Newcomers, Offences, Recent, shut

WORKER, CHATTY = b"worker".hex(), b"chatty".hex()


def test_the_peers_used_last_are_remembered() -> None:
    recent: Recent[int] = Recent(most=3)
    for number in range(100):
        recent.put(str(number), number)
        recent.get("0")
    assert len(recent) == 3
    assert [recent.get(peer) for peer in ("0", "98", "99", "97")] == [0, 98, 99, None]


def test_a_peer_is_cut_off_after_its_last_offence() -> None:
    offences = Offences()
    for number in range(1, MOST_OFFENCES + 10):
        assert offences.is_cut_off("vandal") == (number > MOST_OFFENCES)
        assert offences.count("vandal") == number
    assert not offences.is_cut_off("worker")
    assert offences.num_cut_off == 1


def test_memory_for_offences_is_bounded() -> None:
    offences = Offences()
    for number in range(3 * MOST_PEERS):
        offences.count(str(number))
    assert len(offences._counts) == MOST_PEERS


@pytest.mark.parametrize("num_bytes", [100, 2**16])
def test_a_worker_with_thousands_of_samples_loses_no_message(num_bytes: int) -> None:
    """A message for each of 4000 samples in ten seconds; then all of them at once."""
    allowances = Allowances()
    assert all(allowances.admits(WORKER, num_bytes, 10 + number / 400) for number in range(4000))
    assert all(allowances.admits(WORKER, num_bytes, 40.0) for _ in range(4000))


def test_a_flood_passes_at_the_rate_of_the_allowance() -> None:
    allowances = Allowances()
    num_passed = sum(allowances.admits(CHATTY, 100, number / 50_000) for number in range(100_000))
    assert 10_000 <= num_passed <= 10_200
    assert allowances.admits(WORKER, 100, 2.0)


def test_a_peer_gets_half_of_the_loop_however_small_the_messages() -> None:
    allowances, worked_s = Allowances(), 0.0
    for number in range(10_000):
        if allowances.admits(CHATTY, 100, number / 100):
            allowances.charge(CHATTY, 0.05)
            worked_s += 0.05
    assert worked_s == pytest.approx(50.0, rel=0.05)
    assert allowances.admits(WORKER, 100, 100.0)


@pytest.mark.parametrize(
    ("passed_s", "worked_s", "charged_s"),
    [
        pytest.param(0.0001, 0.0, 0.0001, id="short: the clock"),
        pytest.param(0.005, 0.0001, 0.0001, id="a wait for the GIL"),
        pytest.param(0.03, 0.03, 0.03, id="work"),
    ],
)
def test_no_peer_is_charged_for_a_wait(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, worked_s: float, charged_s: float
) -> None:
    now = {"perf_counter": 100.0, "thread_time": 7.0}
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(peers.time, name, lambda name=name: now[name])
    laps = Laps()
    laps.begin()
    for _ in range(2):
        now["perf_counter"] += passed_s
        now["thread_time"] += worked_s
        assert laps.lap_s() == pytest.approx(charged_s)
    now["perf_counter"] += 5.0  # between two rounds
    now["thread_time"] += 3.0
    laps.begin()
    now["perf_counter"] += passed_s
    now["thread_time"] += worked_s
    assert laps.lap_s() == pytest.approx(charged_s)


def test_no_peer_is_charged_for_the_short_laps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"perf_counter": 100.0, "thread_time": 7.0}
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(peers.time, name, lambda name=name: now[name])
    laps = Laps()
    laps.begin()

    def lap(passed_s: float, worked_s: float) -> float:
        now["perf_counter"] += passed_s
        now["thread_time"] += worked_s
        return laps.lap_s()

    assert sum(lap(150e-6, 150e-6) for _ in range(1000)) == pytest.approx(0.15)
    assert lap(0.15, 20e-6) == pytest.approx(20e-6)
    assert sum(lap(150e-6, 0.0) for _ in range(1000)) == pytest.approx(0.15)  # by the clock, so more than it worked
    assert lap(0.3, 0.2) == pytest.approx(0.05), "it was charged before, to whomever"
    assert lap(0.3, 0.2) == pytest.approx(0.2)


def test_a_message_larger_than_the_whole_allowance_passes() -> None:
    allowances = Allowances()
    assert allowances.admits(WORKER, 2**31, 0.0)
    assert not allowances.admits(WORKER, 100, 0.1)
    assert allowances.admits(WORKER, 100, 60.0)


@pytest.fixture
def few_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_files")
def test_a_connection_is_ended_without_a_free_descriptor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as files:
        peer = files.enter_context(socket.create_connection(listener.getsockname()))
        connection = files.enter_context(listener.accept()[0])
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        shut(connection.fileno(), f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        peer.settimeout(10)
        assert peer.recv(1) == b""
        assert os.fstat(connection.fileno()), "libzmq closes the descriptor"


@pytest.mark.usefixtures("few_files")
def test_the_oldest_connection_without_a_worker_is_ended() -> None:
    newcomers = Newcomers()
    assert {newcomers.accepted(number) for number in range(150)} == {None}
    newcomers.known(0)
    assert newcomers.accepted(150) == 1
    newcomers.ended(2)
    assert newcomers.accepted(151) is None
    assert newcomers.accepted(152) == 3
    newcomers.accepted(4)  # the descriptor of another connection now
    assert newcomers.accepted(153) == 5
    newcomers.known(6)
    newcomers.departed(6)
    newcomers.departed(5)  # has ended
    newcomers.ended(7)
    assert [newcomers.accepted(number) for number in range(154, 157)] == [None, 8, 9]
