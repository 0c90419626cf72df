"""Where ranks meet: the store listens on the address asked for, and nowhere else."""

import asyncio
import socket
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event

import psutil
import pytest
import torch
from support.broadcasting import MANIFEST
from support.processes import quickly_started

from areal_rloo.config import is_loopback
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.ports import address_towards, host_and_port
from areal_rloo.weights.collective import CollectiveReader, CollectiveSender
from areal_rloo.weights.rendezvous import join_store, serve_store

CPU = torch.device("cpu")
LOOPBACKS = ["127.0.0.1", "127.0.0.2", *(["::1"] if socket.has_dualstack_ipv6() else [])]


def _all_listening() -> set[tuple[str, int]]:
    """List the addresses and ports at which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {(entry.laddr.ip, entry.laddr.port) for entry in connections if entry.status == psutil.CONN_LISTEN}


def _listening(port: int) -> set[str]:
    return {host for host, number in _all_listening() if number == port}


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_store_listens_on_the_address_asked_for_alone(host: str) -> None:
    store = serve_store(host, 0, timeout_s=10)
    assert _listening(store.port) == {host}
    other = join_store(host, store.port, timeout_s=10)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_a_name_stands_for_its_ipv4_address() -> None:
    store = serve_store("localhost", 0, timeout_s=10)
    assert _listening(store.port) == {"127.0.0.1"}


def test_a_store_takes_the_port_asked_for_and_frees_it_at_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        store = serve_store("127.0.0.1", port, timeout_s=10)
        assert (store.port, _listening(port)) == (port, {"127.0.0.1"})
        del store
    assert _listening(port) == set()


def test_a_taken_port_and_an_address_of_another_host_are_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve_store("127.0.0.1", taken.getsockname()[1], timeout_s=1)
    with pytest.raises(OSError, match="assign"):
        serve_store("203.0.113.7", 0, timeout_s=1)


@pytest.mark.parametrize("host", LOOPBACKS)
def test_the_route_to_a_loopback_address_starts_on_loopback(host: str) -> None:
    assert address_towards(host) == ("::1" if host == "::1" else "127.0.0.1")


@pytest.mark.parametrize("host", [host for host in LOOPBACKS if host != "127.0.0.2"])
def test_a_broadcast_opens_ports_on_the_address_asked_for_alone(host: str) -> None:
    """The store and both ends of Gloo, which run in this process."""

    async def scenario() -> None:
        sender = CollectiveSender(MANIFEST, host=host, device=CPU, timeout_s=20)
        reader = CollectiveReader("w", CPU)
        before = _all_listening()
        sent = await sender.stage()
        for bucket in sent:
            bucket.fill_(3)
        offer = await sender.offer(sent, ["w"])
        received, _ = await asyncio.gather(reader.take(offer, MANIFEST), sender.send(sent))
        filled = zip(received, sent, MANIFEST.filled_bytes, strict=True)
        assert all(torch.equal(ours[:num], theirs[:num]) for ours, theirs, num in filled)
        assert {address for address, _ in _all_listening() - before} == {host}
        sender.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("host", LOOPBACKS)
def test_learner_ranks_meet_on_the_interface_asked_for_alone(host: str) -> None:
    context = quickly_started()
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        address = host_and_port(host, free.getsockname()[1])
    answers, ends = context.Queue(), context.Event()
    processes = [context.Process(target=_meet, args=(address, rank, answers, ends)) for rank in (1, 0)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=100) for _ in processes]
    ends.set()
    for process in processes:
        process.join(60)
    assert [total for total, _ in found] == [2.0, 2.0]
    listening = set().union(*(addresses for _, addresses in found))
    assert host in listening
    assert all(map(is_loopback, listening)), "Gloo takes any address of the same interface"


def _meet(address: str, rank: int, answers: "Queue[tuple[float, set[str]]]", ends: Event) -> None:
    ranks = Ranks.meet(address, rank=rank, num=2, device=CPU, timeout_s=60)
    total = float(ranks.total(torch.ones(1)))
    answers.put((total, {host for host, _ in _all_listening()}))
    ends.wait(60)
    ranks.close()
