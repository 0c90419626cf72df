"""JSON and msgpack from files, processes, and peers to values: whatever the bytes are, a failure is a DecodeError.

msgspec itself raises other exceptions than its own: UnicodeDecodeError for a text that is not UTF-8, RecursionError for
arrays nested too deeply. A handler that forgets them ends a thread of the learner for a flipped bit in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from areal_rloo.errors import DecodeError

if TYPE_CHECKING:
    from aiohttp import StreamReader

_PIECE_BYTES = 1 << 16
_Value = TypeVar("_Value")


def from_json(content: bytes, kind: type[_Value] | UnionType, *, name: str = "JSON") -> _Value:
    """Decode JSON as a value of `kind`; `name` is that of the bytes in an error.

    Raises:
        DecodeError: the bytes are no JSON, or another value; names the field.
    """
    return cast("_Value", _decoded(_json_decoder(cast("Hashable", kind)).decode, content, name))


def from_msgpack(
    content: bytes | bytearray | memoryview | msgspec.Raw, kind: type[_Value] | UnionType, *, name: str = "bytes"
) -> _Value:
    """Decode msgpack as a value of `kind`; `name` is that of the bytes in an error.

    Raises:
        DecodeError: the bytes are no msgpack, or another value; names the field.
    """
    return cast("_Value", _decoded(_msgpack_decoder(cast("Hashable", kind)).decode, content, name))


async def read_body(content: StreamReader, *, most_bytes: int) -> bytes | None:
    """Read the body of an HTTP answer; return None for more than `most_bytes`. aiohttp itself reads without a limit."""
    body = bytearray()
    async for piece in content.iter_chunked(_PIECE_BYTES):
        body += piece
        if len(body) > most_bytes:
            return None
    return bytes(body)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _decoded(decode: Callable[[Any], Any], content: Any, name: str) -> Any:
    try:
        return decode(content)
    except (ValueError, RecursionError) as error:  # msgspec's own exceptions are ValueErrors
        raise DecodeError(f"{name}: {error}") from error
