"""Check rows and items at load: encode them as on the wire to the rollout workers, and bound depth and size."""

from __future__ import annotations

from typing import Any

import msgspec

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.trajectory import Item

MOST_BYTES = 64 * 2**20  # of a row
MOST_DEPTH = 64  # far from the depth at which a worker cannot decode a lease


def check_sendable(value: dict[str, Any] | Item, where: str, most_bytes: int = MOST_BYTES) -> None:
    """Check that a rollout worker can read a row or an item.

    Raises:
        DataError: a field cannot be encoded, is nested too deeply, or the whole is too large; names the place.
    """
    expected = f"{where}: expected fields that JSON can represent, of at most {MOST_DEPTH} nested levels"
    try:
        encoded = msgspec.msgpack.encode(value)
        read = from_msgpack(encoded, Item if isinstance(value, Item) else dict)
    except (TypeError, ValueError, OverflowError, RecursionError, DecodeError) as error:
        raise DataError(f"{expected}: {error}") from error
    if not _is_within(read.fields if isinstance(read, Item) else read, MOST_DEPTH):
        raise DataError(f"{expected}; flatten the others, or store them as texts")
    if len(encoded) > most_bytes:
        raise DataError(
            f"{where}: expected at most {most_bytes} bytes on the wire ({MOST_BYTES} for a row, a fifth of "
            f"wire.max_message_bytes for an item), got {len(encoded)}; leave out fields that no reward reads"
        )


def _is_within(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_within(each, depth - 1) for each in inner)
