"""Bytes from outside give a value or a DecodeError: no flipped bit ends a thread with another exception."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.decoding import from_json, from_msgpack
from areal_rloo.errors import DecodeError

KINDS = (int, str, object, dict[str, str], tuple[int, msgspec.Raw])


@pytest.mark.parametrize(
    "content", [b"", b"{", b'"\xff"', b'{"\xff": 1}', b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 5000, b"null"]
)
@pytest.mark.parametrize("kind", [int, dict[str, int]])
def test_bytes_that_are_not_the_value_in_json_are_refused(content: bytes, kind: type) -> None:
    with pytest.raises(DecodeError):
        from_json(content, kind)


@pytest.mark.parametrize(
    "content", [b"", b"\xa1\xff", b"\x91" * 100_000, b"\x92\x06" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc0"]
)
@pytest.mark.parametrize("kind", [str, tuple[int, msgspec.Raw]])
def test_bytes_that_are_not_the_value_in_msgpack_are_refused(content: bytes, kind: type) -> None:
    with pytest.raises(DecodeError):
        from_msgpack(content, kind)


@given(st.binary(max_size=60), st.sampled_from(KINDS))
def test_any_bytes_give_a_value_or_a_decode_error(content: bytes, kind: type) -> None:
    for ours, theirs in ((from_json, msgspec.json.decode), (from_msgpack, msgspec.msgpack.decode)):
        try:
            expected = repr(theirs(content, type=kind))  # type: ignore[operator]
        except Exception:  # noqa: BLE001 - msgspec raises several classes
            with pytest.raises(DecodeError):
                ours(content, kind)
        else:
            assert kind == tuple[int, msgspec.Raw] or repr(ours(content, kind)) == expected  # a Raw shows its address


def test_values_are_decoded_as_the_kind_says() -> None:
    assert from_json(b'{"a": [1, 2]}', dict[str, list[int]]) == {"a": [1, 2]}
    assert from_msgpack(msgspec.msgpack.encode((7, "x")), tuple[int, str] | None) == (7, "x")  # type: ignore[arg-type]
