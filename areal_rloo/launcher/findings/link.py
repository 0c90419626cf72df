"""Two hosts look at the network between them: `doctor --listen` on one, `doctor --reach` on the other.

    reaches ── Hello ─────────────────► listens      a nonce, the name it calls itself
            ◄───────────── Greeting ──               the nonce, its own name, where the Hello came from, another port
            ── ? ─────────────────────►              NUM_TURNS times: its clock, and the round trip
            ◄───────────────── clock ──
            ── TRANSFER_BYTES ────────►
            ◄──────── TRANSFER_BYTES ──
            ── nonce, on another port ►              collectives meet on ports that nobody chose
            ◄───────────────── nonce ──

Whoever connects may be anybody: what is read has a bound, everything a deadline, and nothing that came is used but to
be compared and shown.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import msgspec

from areal_rloo.errors import first_line
from areal_rloo.launcher.findings.base import Finding, ok, size, unsure, within, wrong
from areal_rloo.launcher.findings.disk import clock_finding

NUM_TURNS = 8
TRANSFER_BYTES = 8 * 2**20
CONNECT_S, LOOK_S = 5.0, 30.0
_MAGIC = "areal_rloo doctor 1"
_MOST_MESSAGE_BYTES = 4096
_MOST_VISITORS = 8
_NONCE_BYTES = 16
_HOST_NAME = re.compile(r"[\w.-]{1,253}")
_COMPARED = ("areal-rloo", "torch", "msgspec")
_SLOW_ROUND_TRIP_S, _SLOW_BYTES_PER_S = 0.02, 50 * 2**20


class LinkError(Exception):
    """The other end says something else than it should."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """From whoever reaches."""

    magic: str
    nonce: str
    host: str


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """From whoever listens. `resolved`: the addresses that it finds for the other's name."""

    nonce: str
    host: str
    seen_from: str
    resolved: tuple[str, ...]
    other_port: int
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """What went over one connection. `clock_offset_s`: how far the other clock is ahead."""

    greeting: Greeting
    own_address: str
    round_trip_s: float
    clock_offset_s: float
    sent_bytes_per_s: float
    received_bytes_per_s: float


class Stream:
    """A connection with a deadline on all that is done with it."""

    def __init__(self, connection: socket.socket, ends_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._ends_s = ends_s

    def send(self, data: bytes) -> None:
        self._wait()
        self._connection.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        parts, missing = [], num_bytes
        while missing:
            self._wait()
            part = self._connection.recv(min(missing, 1 << 18))
            if not part:
                raise LinkError("it closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def send_message(self, message: Hello | Greeting) -> None:
        data = msgspec.json.encode(message)
        self.send(struct.pack(">I", len(data)) + data)

    def receive_message(self) -> bytes:
        (length,) = struct.unpack(">I", self.receive(4))
        if length > _MOST_MESSAGE_BYTES:
            raise LinkError("it speaks another language")
        return self.receive(length)

    def _wait(self) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)


def reach(host: str, port: int) -> Iterator[Finding]:
    """What the network to a host that listens is like."""
    name = f"reach {host}:{port}"
    try:
        addresses = _resolved(host)
    except (OSError, UnicodeError) as error:
        fix = "put it into DNS or /etc/hosts of every host, or use its address"
        yield wrong(name, f"{host} cannot be resolved: {first_line(error)}", fix)
        return
    connection = _connected(name, addresses, port)
    if isinstance(connection, Finding):
        yield connection
        return
    with connection:
        reached = _unmapped(connection.getpeername()[0])
        try:
            stream = Stream(connection, time.monotonic() + LOOK_S)
            nonce, measured = _measure(connection, stream)
        except (OSError, LinkError, struct.error, msgspec.MsgspecError) as error:
            what = f"something answers there, not a doctor of this version: {first_line(error)}"
            yield wrong(name, what, f"start `python -m areal_rloo.launcher.doctor --listen {port}` there")
            return
        yield from _judged(name, measured)
        yield _other_port(name, reached, measured.greeting.other_port, nonce)
        yield from _names(name, host, reached, measured)


def serve(host: str, port: int, say: Callable[[Finding], None]) -> None:
    """Listen until interrupted; says where, and of each visitor what became of it."""
    with _listening(host, port) as listener:
        say(ok("listening", f"{host or '*'}:{listener.getsockname()[1]}; Ctrl-C ends it"))
        places = threading.BoundedSemaphore(_MOST_VISITORS)
        while True:
            connection, address = listener.accept()
            if not places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=_attend, args=(connection, _plain(address[0]), places, say), daemon=True).start()


def _attend(
    connection: socket.socket, address: str, places: threading.BoundedSemaphore, say: Callable[[Finding], None]
) -> None:
    try:
        with connection:
            said = ok(f"visitor {address}", f"calls itself {_answer(connection, address)}; all of it went well")
    except (OSError, LinkError, struct.error, msgspec.MsgspecError) as error:
        said = unsure(f"visitor {address}", first_line(error), "see what it says itself")
    finally:
        places.release()
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
        say(said)


def _answer(connection: socket.socket, address: str) -> str:
    """The listening side of one look; gives the name of the visitor."""
    ends_s = time.monotonic() + LOOK_S
    stream = Stream(connection, ends_s)
    hello = msgspec.json.decode(stream.receive_message(), type=Hello)
    if hello.magic != _MAGIC or not _HOST_NAME.fullmatch(hello.host):
        raise LinkError("it is no doctor of this version")
    with _listening(_unmapped(connection.getsockname()[0]), 0) as other:
        stream.send_message(
            Greeting(
                nonce=hello.nonce,
                host=socket.gethostname(),
                seen_from=address,
                resolved=_resolved_or_none(hello.host),
                other_port=other.getsockname()[1],
                versions=_versions(),
            )
        )
        for _ in range(NUM_TURNS):
            stream.receive(1)
            stream.send(struct.pack(">d", time.time()))  # noqa: TID251 - clocks are what is compared
        stream.receive(TRANSFER_BYTES)
        stream.send(bytes(TRANSFER_BYTES))
        other.settimeout(CONNECT_S)
        with contextlib.suppress(TimeoutError):  # the visitor says that it could not
            second, _ = other.accept()
            with second:
                meeting = Stream(second, ends_s)
                meeting.send(meeting.receive(_NONCE_BYTES))
    return hello.host


def _measure(connection: socket.socket, stream: Stream) -> tuple[bytes, Measured]:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send_message(Hello(magic=_MAGIC, nonce=nonce.hex(), host=socket.gethostname()))
    greeting = msgspec.json.decode(stream.receive_message(), type=Greeting)
    if greeting.nonce != nonce.hex():
        raise LinkError("it gives back another nonce")
    turns = []
    for _ in range(NUM_TURNS):
        before_s, began_s = time.time(), time.perf_counter()  # noqa: TID251
        stream.send(b"?")
        (theirs_s,) = struct.unpack(">d", stream.receive(8))
        round_trip_s = time.perf_counter() - began_s
        if not math.isfinite(theirs_s):
            raise LinkError("its clock is no number")
        turns.append((round_trip_s, theirs_s - (before_s + round_trip_s / 2)))
    round_trip_s, offset_s = min(turns)
    began_s = time.perf_counter()
    stream.send(bytes(TRANSFER_BYTES))
    first = stream.receive(1)  # all of ours has arrived
    sent_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    stream.receive(TRANSFER_BYTES - len(first))
    received_s = time.perf_counter() - began_s
    own_address = _plain(connection.getsockname()[0])
    return nonce, Measured(
        greeting, own_address, round_trip_s, offset_s, TRANSFER_BYTES / sent_s, TRANSFER_BYTES / received_s
    )


def _judged(name: str, measured: Measured) -> Iterator[Finding]:
    greeting = measured.greeting
    slowest = min(measured.sent_bytes_per_s, measured.received_bytes_per_s)
    what = (
        f"{_shown(greeting.host)} answers; round trip {1000 * measured.round_trip_s:.2g} ms, "
        f"{size(measured.sent_bytes_per_s)}/s there, {size(measured.received_bytes_per_s)}/s back, "
        f"from {measured.own_address}"
    )
    if measured.round_trip_s > _SLOW_ROUND_TRIP_S or slowest < _SLOW_BYTES_PER_S:
        yield unsure(name, f"{what}: slow", "see whether this is the fast network; NCCL_SOCKET_IFNAME names another")
    else:
        yield ok(name, what)
    if greeting.seen_from != measured.own_address:
        what = f"this host is {measured.own_address}, and is seen there as {_shown(greeting.seen_from)}"
        yield unsure(name, f"{what}: addresses are translated, nobody can call back", "use a network without NAT")
    yield clock_finding("clock", f"the clock of {name.removeprefix('reach ')}", _certain(measured))
    ours = _versions()
    for package in _COMPARED:
        theirs = greeting.versions.get(package, "none")
        if theirs != ours.get(package, "none"):
            what = f"{package} is {ours.get(package, 'none')} here and {_shown(theirs)} there"
            yield wrong("versions", what, "install the same on every host, or share one environment")


def _certain(measured: Measured) -> float:
    """The offset that remains if all of the round trip's time went into one of its ways."""
    beyond_s = max(0.0, abs(measured.clock_offset_s) - measured.round_trip_s / 2)
    return math.copysign(beyond_s, measured.clock_offset_s)


def _other_port(name: str, address: str, port: int, nonce: bytes) -> Finding:
    """Stores and collectives listen on ports that the kernel chooses."""
    fix = "open all ports above 1024 between the hosts of a run"
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            stream = Stream(connection, time.monotonic() + CONNECT_S)
            stream.send(nonce)
            came = stream.receive(_NONCE_BYTES)
    except (OSError, OverflowError, LinkError) as error:
        return wrong(name, f"port {port}, which the kernel chose there, cannot be reached: {first_line(error)}", fix)
    if came != nonce:
        return wrong(name, f"port {port}, which the kernel chose there, is answered by somebody else", fix)
    return ok(name, f"a port that the kernel chose there ({port}) can be reached too")


def _names(name: str, host: str, reached: str, measured: Measured) -> Iterator[Finding]:
    """Does each find the other by its name?"""
    greeting, own = measured.greeting, socket.gethostname()
    fix = "put the names of all hosts into DNS, or /etc/hosts of each"
    if measured.greeting.seen_from not in greeting.resolved:
        found = ", ".join(map(_shown, greeting.resolved)) or "nothing"
        what = f"there {own} resolves to {found}, this host comes from {_shown(greeting.seen_from)}"
        yield unsure(name, what, fix)
    theirs = _resolved_or_none(greeting.host) if _HOST_NAME.fullmatch(greeting.host) else ()
    if _plain(reached) not in map(_plain, theirs):
        found = ", ".join(theirs) or "nothing"
        what = f"here {_shown(greeting.host)} resolves to {found}, {host} was reached at {reached}"
        yield unsure(name, what, fix)


def _connected(name: str, addresses: tuple[str, ...], port: int) -> socket.socket | Finding:
    trouble: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_S)
        except TimeoutError:
            trouble = TimeoutError(f"no answer within {CONNECT_S:g} s")
        except OSError as error:
            trouble = error
    if isinstance(trouble, ConnectionRefusedError):
        fix = f"start `python -m areal_rloo.launcher.doctor --listen {port}` there"
        return wrong(name, f"{addresses[0]} refuses: nothing listens on port {port}", fix)
    what = f"{', '.join(addresses)} cannot be reached: {first_line(trouble)}"
    return wrong(name, what, "open the port in the firewalls between them, and look at `ip route get` for the way")


def _listening(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _resolved(host: str) -> tuple[str, ...]:
    found = within(CONNECT_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _resolved_or_none(host: str) -> tuple[str, ...]:
    try:
        return _resolved(host)[:16]
    except (OSError, UnicodeError):
        return ()


def _plain(address: str) -> str:
    """An address to compare: without the interface that a local one is valid on."""
    return _unmapped(address).partition("%")[0]


def _unmapped(address: str) -> str:
    """An IPv4 address that came through an IPv6 socket, as IPv4."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address)
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
    return address


def _shown(text: str) -> str:
    """What a stranger says of itself, fit for a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:100])


def _versions() -> dict[str, str]:
    found = {}
    for package in _COMPARED:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
