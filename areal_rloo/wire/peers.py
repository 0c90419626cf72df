"""The learner's memory of each peer: the offences, the work for it, and how many messages the peer may send now.

Peers come and go without end, so memory is for the `MOST_PEERS` heard last. All values are far beyond an honest worker,
and nothing here cuts off an honest worker: a message above the allowance is lost, and the protocol sends it again.
"""

from __future__ import annotations

import errno
import resource
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import zmq

from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)
T = TypeVar("T")

MOST_PEERS = 4096
MOST_OFFENCES = 8  # of a process, before it is cut off

# A worker sends a message for each turn of its event loop with finished samples, and few others. A large message costs
# as much as several: benchmarks/wire.py reaches 1.6 GB/s.
_MESSAGES_PER_S = 5000.0
_BYTES_PER_MESSAGE = 2**20
_MOST_MESSAGES = 10_000.0  # at once, for example after a train step that blocked the learner
_KEPT_DESCRIPTORS = 256  # for files, and for the weights
_GONE = (errno.EBADF, errno.ENOTSOCK, errno.ENOTCONN)  # libzmq closed the descriptor
_SHORT_LAP_S = 1e-3  # a wait for the processor or the GIL is longer
_FIRST_MESSAGES = 100.0  # of a new peer: a flood cannot get more by new connections


class Recent(Generic[T]):
    """Values by peer, for the peers used last."""

    def __init__(self, most: int = MOST_PEERS) -> None:
        self._most = most
        self._values: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, peer: str) -> T | None:
        value = self._values.get(peer)
        if value is not None:
            self._values.move_to_end(peer)
        return value

    def put(self, peer: str, value: T) -> None:
        self._values[peer] = value
        self._values.move_to_end(peer)
        if len(self._values) > self._most:
            self._values.popitem(last=False)


class Offences:
    """Counts the offences of each peer. A peer with `MOST_OFFENCES` is cut off: its messages are read no more."""

    def __init__(self) -> None:
        self._counts: Recent[int] = Recent()
        self.num_cut_off = 0

    def count(self, peer: str) -> int:
        """Count an offence; return the number of the peer's offences."""
        number = (self._counts.get(peer) or 0) + 1
        self._counts.put(peer, number)
        self.num_cut_off += number == MOST_OFFENCES
        return number

    def is_cut_off(self, peer: str) -> bool:
        return (self._counts.get(peer) or 0) >= MOST_OFFENCES


@dataclass(slots=True)
class _Allowance:
    messages: float
    since_s: float
    used_up: bool = False


class Allowances:
    """Says for each message of a peer if the peer may send the message now."""

    def __init__(self) -> None:
        self._allowances: Recent[_Allowance] = Recent()

    def admits(self, peer: str, num_bytes: int, now_s: float) -> bool:
        """Charge a message. Any message passes while something is left: a message can cost more than the maximum."""
        allowance = self._allowances.get(peer)
        if allowance is None:
            allowance = _Allowance(_FIRST_MESSAGES, now_s)
            self._allowances.put(peer, allowance)
        regained = (now_s - allowance.since_s) * _MESSAGES_PER_S
        allowance.messages, allowance.since_s = min(_MOST_MESSAGES, allowance.messages + regained), now_s
        if allowance.messages <= 0:
            if not allowance.used_up:
                text = "%s floods: discard its messages beyond %.0f a second"
                logger.warning(text, bytes.fromhex(peer)[:64], _MESSAGES_PER_S)
            allowance.used_up = True
            return False
        allowance.used_up = allowance.used_up and allowance.messages < _FIRST_MESSAGES
        allowance.messages -= 1 + num_bytes / _BYTES_PER_MESSAGE
        return True

    def charge(self, peer: str, work_s: float) -> None:
        """Charge the seconds of the loop's thread that a message took, known afterwards: half of them can be a peer's.

        The size of a message says little about the work: thousands of answers that come too late fit into 100 KB.
        """
        if (allowance := self._allowances.get(peer)) is not None:
            allowance.messages -= work_s * 2 * _MESSAGES_PER_S


class Laps:
    """Processor time of this thread from message to message, which the peers are charged for.

    A short time is that of the clock: the thread's own takes 20 us to read on a busy machine. A long time may be a wait
    for the processor or for the GIL, which no peer is charged for.
    """

    def __init__(self) -> None:
        self._clock_s = self._thread_s = 0.0

    def begin(self) -> None:
        """Begin a lap: the thread may have done other work, or may have waited."""
        self._clock_s, self._thread_s = time.perf_counter(), time.thread_time()

    def lap_s(self) -> float:
        """End a lap and begin the next; return the time."""
        now_s = time.perf_counter()
        lap_s, self._clock_s = now_s - self._clock_s, now_s
        if lap_s < _SHORT_LAP_S:
            self._thread_s += lap_s  # at most: no later lap pays for this one
            return lap_s
        before_s, self._thread_s = self._thread_s, time.thread_time()
        return min(lap_s, max(0.0, self._thread_s - before_s))


class Newcomers:
    """The connections of no welcomed worker, oldest first, by descriptor.

    ZeroMQ passes on messages only after the handshake, so a stranger without the key stays a newcomer, and makes room
    for later connections when the descriptors run out. (The event of a successful handshake names no connection.)
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._waiting: dict[int, None] = {}

    def accepted(self, descriptor: int) -> int | None:
        """Add a connection; return the connection to end, if there are too many."""
        self.ended(descriptor)
        self._open.add(descriptor)
        self._waiting[descriptor] = None
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(self._open) <= max(most // 2, most - _KEPT_DESCRIPTORS):
            return None
        oldest = next(iter(self._waiting))
        self.ended(oldest)
        return oldest

    def known(self, descriptor: int) -> None:
        """Note that a connection is a welcomed worker's."""
        self._waiting.pop(descriptor, None)

    def departed(self, descriptor: int) -> None:
        """Note that the worker of a connection has left."""
        if descriptor in self._open:
            self._waiting[descriptor] = None

    def ended(self, descriptor: int) -> bool:
        """Forget a connection; return True if it was no welcomed worker's."""
        self._open.discard(descriptor)
        return descriptor in self._waiting and self._waiting.pop(descriptor) is None


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Return the descriptor of the connection of a frame; None for a peer of an early ZMTP."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def shut(descriptor: int, endpoint: str) -> None:
    """End the connection with this descriptor, if the connection belongs to our endpoint.

    libzmq may have closed the descriptor meanwhile, and the number may be another file's. If the number is that of
    another peer's connection, the peer connects again. No other descriptor is needed: none may be free.
    """
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError as error:
        if error.errno not in _GONE:
            logger.warning("cannot end a connection: %s", error)
        return
    try:
        name = connection.getsockname()
        if endpoint == f"ipc://{name}" or (isinstance(name, tuple) and endpoint.endswith(f":{name[1]}")):
            connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in _GONE:
            logger.warning("cannot end a connection: %s", error)
    finally:
        connection.detach()  # libzmq closes the descriptor
