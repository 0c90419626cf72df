"""The envelope of a message: the wire version, and a checksum of all bytes.

A token or logprob that changed on the way, or in the memory of a host, would be trained without a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.wire.columns import Frame
from areal_rloo.wire.messages import WIRE_VERSION

_encoder = msgspec.msgpack.Encoder()


def sealed(message: bytes, *rest: Frame) -> bytes:
    """Return the first frame of an encoded message with other frames."""
    return _encoder.encode((WIRE_VERSION, (_checksum(message, rest), msgspec.Raw(message))))


def opened(frames: Sequence[Frame]) -> msgspec.Raw:
    """Return the encoded message in the first of these frames.

    Raises:
        WireVersionError: the peer speaks another wire version.
        DecodeError: a frame is not as it was sent, or the first is no envelope.
    """
    version, body = from_msgpack(frames[0], tuple[int, msgspec.Raw], name="header")
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"peer speaks wire version {version}, this process speaks {WIRE_VERSION}; "
            "run the same areal_rloo version on every node"
        )
    expected, message = from_msgpack(body, tuple[int, msgspec.Raw], name="header")
    if (found := _checksum(message, frames[1:])) != expected:
        raise DecodeError(
            f"message: expected bytes with the checksum {expected}, got {found}: they changed on the way or in memory; "
            "if this happens again, test the memory and the network of both hosts"
        )
    return message


def _checksum(message: bytes | msgspec.Raw, rest: Sequence[Frame]) -> int:
    """Return the CRC-32 of all bytes."""
    found = zlib.crc32(message)
    for frame in rest:
        found = zlib.crc32(frame, found)
    return found
