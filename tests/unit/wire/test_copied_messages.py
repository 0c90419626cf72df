"""A message on the way does not share memory with the sender."""

import asyncio
from collections import Counter

import zmq
import zmq.asyncio

from areal_rloo.wire.channels import _sent
from areal_rloo.wire.columns import Limits


def test_a_sent_message_keeps_its_bytes_whatever_becomes_of_the_memory() -> None:
    async def send() -> bytes:
        with zmq.asyncio.Context() as context:
            end, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            end.bind("inproc://memory")
            other.connect("inproc://memory")
            large = bytearray(b"a" * 200_000)  # pyzmq shares memory from 64 KiB on
            assert _sent(end, [large], Counter(), Limits())
            large[:] = b"b" * len(large)
            received = bytes(await other.recv())
            end.close(0)
            other.close(0)
            return received

    assert asyncio.run(send()) == b"a" * 200_000
