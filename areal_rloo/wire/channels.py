"""The two ends of the wire, for asyncio: `LearnerChannel` (ROUTER) and `WorkerChannel` (DEALER).

Sends never block: a message to a peer that is gone, or whose queue is full, is lost and counted, and the protocol
recovers (wire/messages.py). So neither end can hold up the other.

A flooding peer costs the learner a bounded share of the loop, memory and log. ZeroMQ takes the messages of the
connections in turn, so the messages of other peers arrive. Messages above the allowance of a peer (peers.py) are
discarded unread, and then the loop pauses. All messages of a peer that is cut off are discarded; its connection stays,
because the descriptor of a queued message may be another peer's by now. A limited number of unread messages waits in
the socket, the others at the peer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.wire.address import Address, Admission, Connection, bind, make_socket
from areal_rloo.wire.codec import decode_learner, decode_worker, encode
from areal_rloo.wire.columns import Frame, Limits
from areal_rloo.wire.counts import ChannelStatistics
from areal_rloo.wire.messages import Heartbeat, Hello, LearnerMessage, Leases, Refusal, Welcome, WorkerMessage
from areal_rloo.wire.peers import MOST_OFFENCES, Allowances, Laps, Newcomers, Offences, descriptor_of, shut

logger = get_logger(__name__)

_HIGH_WATER_MARK = 100_000  # of a worker: messages
_UNREAD, _UNSENT = 64, 10_000  # messages of a peer in the learner's memory
_MOST_FRAMES = 3  # of a message: peer, header and columns
_ROUND_FRAMES, _ROUND_S = 2048, 0.005  # read, or of this thread's time, before other tasks have their turn
_ROUND_EVENTS = 256
_MORE_TURNS = (0.0, 0.0, 0.0)  # of the loop between rounds: the call of another thread takes as many
_GATHER_S = 0.002  # from round to round: a round with what follows costs as much as several messages
_FLOOD_PAUSE_S = 0.01
_HANDSHAKE_MS = 5000  # then libzmq ends the connection
_BACKLOG = 4096  # all workers and a crowd at once: the kernel drops what does not fit, and the peer waits for seconds
_LEASES_BYTES = 8 * 2**20  # soft limit of a message with several leases


class LearnerChannel:
    """The learner's end: receives from every worker, and sends to a worker by peer id."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        socket: zmq.asyncio.Socket,
        admission: Admission | None,
        address: Address,
        limits: Limits,
    ) -> None:
        self._context, self._socket = context, socket
        self._direct: zmq.Socket[zmq.Frame] = zmq.Socket.shadow(socket.underlying)  # never waits, and makes no futures
        self.address, self.admission = address, admission
        self._limits = limits
        self._max_leases_bytes = min(_LEASES_BYTES, limits.max_message_bytes // 2)
        self._inbox: deque[tuple[str, WorkerMessage]] = deque()
        self._counts: Counter[str] = Counter()
        self._peers: dict[int, str] = {}  # by the descriptor of their connection
        self._newcomers = Newcomers()
        self._lost: deque[str] = deque()  # peers whose connection has ended
        self._offences, self._allowances, self.laps = Offences(), Allowances(), Laps()
        self._frames: list[zmq.Frame] = []  # of an unfinished message
        self._next_round_s = 0.0  # monotonic time
        # The argument is the set of events; the kernel closes the connections of a killed process at once.
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED)

    @classmethod
    def bind(cls, address: Address, *, limits: Limits) -> LearnerChannel:
        """Bind a socket. Call this on the event loop of the channel.

        Raises:
            PreflightError: the address is taken or is not of this host, or other users can enter the socket's folder.
        """
        context = zmq.asyncio.Context()  # a context can have a single authenticator
        try:
            socket = _socket(context, zmq.ROUTER, address, limits)
            socket.rcvhwm, socket.sndhwm = _UNREAD, _UNSENT
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            socket.setsockopt(zmq.BACKLOG, _BACKLOG)
            socket.router_mandatory = 1
            socket.router_handover = 1
            bound, admission = bind(socket, context, address)
        except BaseException:
            context.destroy(0)
            raise
        return cls(context, socket, admission, bound, limits)

    async def receive(self) -> tuple[str, WorkerMessage]:
        """Return the next message and the sender. Unreadable messages are counted, logged and answered."""
        if not self._inbox:  # reading a queued message does not suspend: let other tasks run, and messages gather
            for wait_s in (max(0.0, self._next_round_s - time.monotonic()), *_MORE_TURNS):
                await asyncio.sleep(wait_s)
        while not self._inbox:
            self._next_round_s = time.monotonic() + _GATHER_S
            if self._read_round():
                await asyncio.sleep(_FLOOD_PAUSE_S)
                self.laps.begin()
            elif not self._inbox:  # to wait costs more than to look
                await self._socket.poll()
        return self._inbox.popleft()

    async def disconnected(self) -> str:
        """Return the next peer whose connection has ended. End connections beyond the limit of descriptors."""
        while not self._lost:
            await self._monitor.poll()
            self._read_events()
            await asyncio.sleep(0)  # reading a queued event does not suspend
        return self._lost.popleft()

    def disconnected_by_now(self) -> list[str]:
        """Return the peers whose connection has ended before the last message, as far as not returned yet."""
        lost, self._lost = [*self._lost], deque()
        return lost

    def send(self, peer: str, message: LearnerMessage) -> bool:
        """Send without waiting; returns False if the peer is gone or the queue is full."""
        frames = encode(message)
        if isinstance(message, Leases) and len(message.leases) > 1 and len(frames[0]) > self._max_leases_bytes:
            half = len(message.leases) // 2
            parts = (message.leases[:half], message.leases[half:])
            sent = [self.send(peer, msgspec.structs.replace(message, leases=part)) for part in parts]
            return all(sent)
        if not _sent(self._socket, self._direct, frames, self._counts, self._limits, to=[bytes.fromhex(peer)]):
            logger.info("%s to %s is lost", type(message).__name__, peer)
            return False
        if isinstance(message, Welcome):
            self._note(peer, self._newcomers.known)
        return True

    @property
    def has_more(self) -> bool:
        """True if `receive` returns the next message at once."""
        return bool(self._inbox)

    def charge(self, peer: str, work_s: float) -> None:
        """Charge a peer for work with a message, in seconds of this thread, as `laps` counts them."""
        self._allowances.charge(peer, work_s)

    def departed(self, peer: str) -> None:
        """Note the Goodbye of a peer: other connections may need the descriptor."""
        self._note(peer, self._newcomers.departed)

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(**self._counts, cut_off=self._offences.num_cut_off)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        if self.admission is not None:
            self.admission.authenticator.stop()
        self._context.destroy(0)

    def _note(self, peer: str, note: Callable[[int], None]) -> None:
        for descriptor in [descriptor for descriptor, known in self._peers.items() if known == peer]:
            note(descriptor)

    def _read_round(self) -> bool:
        """Read queued frames, up to a bound, so other tasks have their turn; returns True during a flood."""
        num_discarded, num_excess = self._counts["discarded"], 0
        work_s = 0.0
        self.laps.begin()
        for _ in range(_ROUND_FRAMES):
            try:
                frame = self._direct.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(self._frames) <= _MOST_FRAMES:  # keep a frame too many, so the codec refuses the message
                self._frames.append(frame)
            else:
                num_excess += 1
            if not frame.more:
                frames, self._frames = self._frames, []
                peer, lap_s = self._take(frames), self.laps.lap_s()
                self.charge(peer, lap_s)
                if (work_s := work_s + lap_s) > _ROUND_S:
                    break
        return num_excess > 0 or self._counts["discarded"] > num_discarded

    def _take(self, frames: Sequence[zmq.Frame]) -> str:
        """Decode a message, or discard the message unread; returns the peer."""
        identity, body = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        num_bytes = sum(map(len, body))
        self._counts["messages_in"] += 1
        self._counts["bytes_in"] += num_bytes
        peer = identity.hex()
        if self._offences.is_cut_off(peer) or not self._allowances.admits(peer, num_bytes, time.monotonic()):
            self._counts.update(("refused", "discarded"))
            return peer
        try:
            message = decode_worker(body, self._limits)
            if isinstance(message, Hello | Heartbeat) and (descriptor := descriptor_of(frames[-1])) is not None:
                if self._peers.get(descriptor) != peer:
                    self._read_events()  # first: the descriptor may have been another peer's until now
                self._peers[descriptor] = peer
            self._inbox.append((peer, message))
        except (DecodeError, WireVersionError) as error:
            self._counts["refused"] += 1
            is_cut_off = self._offences.count(peer) >= MOST_OFFENCES
            logger.warning("a message from %s is refused: %s", identity[:64], error)
            self.send(peer, Refusal(str(error)[:1000], final=is_cut_off))
            if is_cut_off:
                logger.error("%s sent %d unreadable messages: it is cut off", identity[:64], MOST_OFFENCES)
        return peer

    def _read_events(self) -> None:
        """Read queued events of the connections, up to a bound."""
        direct: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
        for _ in range(_ROUND_EVENTS):
            try:
                event = parse_monitor_message(direct.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._end_excess(self._newcomers.accepted(descriptor))
                continue
            was_silent = self._newcomers.ended(descriptor)
            if (peer := self._peers.pop(descriptor, None)) is not None:  # ACCEPTED may be read after the first message
                self._lost.append(peer)
            elif was_silent:
                self._counts["refused_connections"] += 1
                logger.warning("a connection ended before its first message: a stranger, or a peer with other keys")

    def _end_excess(self, descriptor: int | None) -> None:
        if descriptor is not None:
            self._counts["excess_connections"] += 1
            logger.error("end a connection: the open files run out; raise the limit with ulimit -n")
            shut(descriptor, self.address.endpoint)


class WorkerChannel:
    """A rollout worker's end. Create the channel on the event loop that uses it."""

    def __init__(self, address: Address, *, worker_id: str, incarnation: str, limits: Limits) -> None:
        """Connect to the learner, who may be away.

        Raises:
            PreflightError: other users can enter the socket's folder, so another program may listen there.
        """
        self._address, self._limits = address, limits
        self._identity = f"{worker_id}#{incarnation}".encode()[:255]
        self._counts: Counter[str] = Counter()
        self._connection = self._connect()

    def connect_anew(self) -> None:
        """Replace the socket: libzmq never connects again after a violation of its protocol. Unsent messages are lost.

        Raises:
            PreflightError: the socket's folder is gone, or other users can enter.
        """
        before = self._connection
        self._connection = self._connect()  # first: the event loop knows the old descriptor for a while
        before.close(0)

    async def connected(self, timeout_s: float) -> bool:
        """Wait until the learner is connected; returns False after the timeout."""
        return bool(await self._socket.poll(int(1000 * timeout_s), zmq.POLLOUT))  # type: ignore[call-arg]

    def send(self, message: WorkerMessage) -> bool:
        """Send without waiting; returns False if the learner is away or the queue is full."""
        return _sent(self._socket, self._connection.direct, encode(message), self._counts, self._limits)

    async def receive(self) -> LearnerMessage:
        """Return the next message.

        Raises:
            WireVersionError: the learner speaks another wire version.
            DecodeError: a message is unreadable.
        """
        frames = await self._received()
        self._counts["messages_in"] += 1
        self._counts["bytes_in"] += sum(map(len, frames))
        try:
            return decode_learner(frames, self._limits)
        except (DecodeError, WireVersionError):
            self._counts["refused"] += 1
            raise

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(**self._counts)

    def close(self) -> None:
        """Stop sending; queued messages get a second to leave."""
        self._connection.close(1000)

    async def _received(self) -> list[bytes]:
        while True:
            connection, task = self._connection, asyncio.current_task()
            try:
                return await connection.socket.recv_multipart()
            except asyncio.CancelledError:
                if connection is self._connection or task is None or task.cancelling():
                    raise  # else `connect_anew` has closed the socket

    @property
    def _socket(self) -> zmq.asyncio.Socket:
        return self._connection.socket

    def _connect(self) -> Connection:
        socket = _socket(zmq.asyncio.Context.instance(), zmq.DEALER, self._address, self._limits)
        return Connection(socket, self._address, self._identity)


def _sent(
    socket: zmq.asyncio.Socket,
    direct: zmq.Socket[Any],
    frames: Sequence[Frame],
    counts: Counter[str],
    limits: Limits,
    *,
    to: Sequence[bytes] = (),
) -> bool:
    """Send without waiting, and count; returns False if the message is lost."""
    num_bytes = sum(map(len, frames))
    if num_bytes > limits.max_message_bytes:  # the other end would end the connection
        logger.error("a message of %d bytes is lost: wire.max_message_bytes=%d", num_bytes, limits.max_message_bytes)
        counts["unroutable"] += 1
        return False
    try:  # copies, so that no frame depends on when another thread of pyzmq frees the memory
        direct.send_multipart([*to, *frames], zmq.NOBLOCK, copy=True)
    except zmq.ZMQError:
        counts["unroutable"] += 1
        return False
    finally:
        if not socket.closed:
            socket.get(zmq.EVENTS)  # the send may have taken the event for which `receive` or `connected` waits
    counts["messages_out"] += 1
    counts["bytes_out"] += num_bytes
    return True


def _socket(context: zmq.asyncio.Context, kind: int, address: Address, limits: Limits) -> zmq.asyncio.Socket:
    socket = make_socket(context, kind, address)
    socket.set_hwm(_HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket
