"""JSON and msgpack from files, processes, and peers to values: whatever the bytes are, a failure is a DecodeError.

msgspec itself raises other exceptions than its own: UnicodeDecodeError for a text that is not UTF-8, RecursionError for
arrays nested too deeply. A handler that forgets them ends a thread of the learner for a flipped bit in a file.
"""

from collections.abc import Hashable
from functools import cache
from types import UnionType
from typing import Any, Protocol, TypeVar, cast

import msgspec

from areal_rloo.errors import DecodeError

_Value = TypeVar("_Value")


def from_json(content: bytes, kind: type[_Value] | UnionType, *, name: str = "JSON") -> _Value:
    """Decode JSON as a value of `kind`; `name` is that of the bytes in an error.

    Raises:
        DecodeError: the bytes are no JSON, or another value; names the field.
    """
    return cast("_Value", _decoded(_json_decoder(cast("Hashable", kind)), content, name))


def from_msgpack(
    content: "bytes | bytearray | memoryview | msgspec.Raw", kind: type[_Value] | UnionType, *, name: str = "bytes"
) -> _Value:
    """Decode msgpack as a value of `kind`; `name` is that of the bytes in an error.

    Raises:
        DecodeError: the bytes are no msgpack, or another value; names the field.
    """
    return cast("_Value", _decoded(_msgpack_decoder(cast("Hashable", kind)), content, name))


class _Decoder(Protocol):
    def decode(self, content: Any, /) -> Any: ...


@cache
def _json_decoder(kind: Any) -> _Decoder:
    return msgspec.json.Decoder(kind)


@cache
def _msgpack_decoder(kind: Any) -> _Decoder:
    return msgspec.msgpack.Decoder(kind)


def _decoded(decoder: _Decoder, content: Any, name: str) -> Any:
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:  # msgspec's own exceptions are ValueErrors
        raise DecodeError(f"{name}: {error}") from error
