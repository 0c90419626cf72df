"""A message arrives as it was sent, or is refused: nothing but the bytes tells a wrong token from the right one."""

import asyncio
from collections import Counter

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.channels import _sent
from areal_rloo.wire.codec import decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import WIRE_VERSION, Failed, Finished, Results


def _results() -> list[bytes]:
    """Return frames, each of some bytes."""
    columns = (np.arange(9, dtype=np.int32), -np.ones(9, np.float32), np.zeros(9, np.int32))
    made = Trajectory(1, 0, np.ones(3, np.int32), Completion(*columns, "stop"), 1.0, {}, np.ones(9, np.float32))
    failed = Failed(7, 1, 1, "reward_timeout", "no result", "some text", 7)
    return [bytes(frame) for frame in encode(Results("learner", 1, (Finished(3, (made,)),), (failed,)))]


@given(st.integers(0, 1), st.integers(0, 10**6), st.integers(1, 255))
def test_a_byte_that_changes_on_the_way_is_noticed(number: int, place: int, flip: int) -> None:
    """Another spelling of the same checksum is none of the changes that matter."""
    sent = _results()
    frames = [bytearray(frame) for frame in sent]
    frames[number][place % len(frames[number])] ^= flip
    try:
        message = decode_worker([bytes(frame) for frame in frames], Limits())
    except (DecodeError, WireVersionError):
        return
    assert [bytes(frame) for frame in encode(message)] == sent


def test_a_message_with_another_checksum_is_refused_with_a_remedy() -> None:
    header, *columns = _results()
    _, (checksum, message) = msgspec.msgpack.decode(header)
    changed = msgspec.msgpack.encode((WIRE_VERSION, (checksum + 1, message)))
    expected = (
        rf"expected bytes with the checksum {checksum + 1}, got {checksum}: .*; .* test the memory and the network"
    )
    with pytest.raises(DecodeError, match=expected):
        decode_worker([changed, *columns], Limits())


def test_a_sent_message_keeps_its_bytes_whatever_becomes_of_the_memory() -> None:
    async def send() -> bytes:
        with zmq.asyncio.Context() as context:
            end, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            end.bind("inproc://memory")
            other.connect("inproc://memory")
            large = bytearray(b"a" * 200_000)  # pyzmq shares memory from 64 KiB on
            assert _sent(end, zmq.Socket.shadow(end.underlying), [large], Counter(), Limits())
            large[:] = b"b" * len(large)
            received = bytes(await other.recv())
            end.close(0)
            other.close(0)
            return received

    assert asyncio.run(send()) == b"a" * 200_000
