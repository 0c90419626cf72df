"""A message costs a bounded multiple of its bytes: every collection and text in a message has a largest length."""

import contextlib
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from areal_rloo.errors import DecodeError, shortened
from areal_rloo.trajectory import Completion, Item
from areal_rloo.wire.codec import WorkerHeader, decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.envelope import sealed
from areal_rloo.wire.messages import MOST_PARTIALS, Failed, LearnerMessage, Partial, Partials, Results
from areal_rloo.wire.turns import EncodedTurns, RecordedTurn, decode_turns, encode_turns

OF_DATA = Item  # the learner's rows, of any size: a worker trusts the learner


def parts(kind: Any) -> Iterator[tuple[str, Any]]:
    """Give the types inside a type, by name."""
    match kind:
        case inspect.StructType() | inspect.NamedTupleType() if kind.cls is not OF_DATA:
            yield from ((f".{field.name}", field.type) for field in kind.fields)
        case inspect.UnionType():
            yield from (("", each) for each in kind.types)
        case inspect.TupleType():
            yield from (("[]", each) for each in kind.item_types)
        case inspect.VarTupleType() | inspect.ListType():
            yield "[]", kind.item_type
        case inspect.DictType():
            yield from (("[key]", kind.key_type), ("[]", kind.value_type))


def unbounded(kind: Any, path: str = "") -> Iterator[str]:
    """Name each collection and text of a type that may have any length."""
    match kind:
        case inspect.StrType(pattern=str()):  # read once, and shorter than the message
            is_bounded = True
        case inspect.StrType() | inspect.VarTupleType() | inspect.ListType() | inspect.DictType():
            is_bounded = kind.max_length is not None
        case _:
            is_bounded = not isinstance(kind, inspect.AnyType | inspect.RawType | inspect.SetType)
    if not is_bounded:
        yield f"{path}: {type(kind).__name__}"
    for name, part in parts(kind):
        of_struct = kind.cls.__name__ if isinstance(kind, inspect.StructType) else path
        yield from unbounded(part, f"{of_struct}{name}")


@pytest.mark.parametrize(
    "kind", [WorkerHeader, LearnerMessage, EncodedTurns], ids=["of a worker", "of the learner", "turns in a partial"]
)
def test_every_collection_and_text_of_a_message_has_a_bound(kind: Any) -> None:
    assert list(unbounded(inspect.type_info(kind))) == []


def test_a_type_without_a_bound_is_found() -> None:
    class Found(msgspec.Struct):
        pairs: tuple[tuple[str, int], ...]

    assert list(unbounded(inspect.type_info(Found))) == ["Found.pairs: VarTupleType", "Found.pairs[][]: StrType"]


HELLO = {
    "type": "hello",
    "worker_id": "w",
    "incarnation": "1",
    "capacity_samples": 0,
    "policy_version": None,
    "learner_id": "learner",
    "number": 1,
    "newest_lease": 0,
    "work": [0, 0],
}
RESULTS: dict[str, object] = {
    "type": "results",
    "learner_id": "l",
    "number": 1,
    "leases": [],
    "trajectories": [],
    "failed": [],
}
NUM = 300_000


@pytest.mark.parametrize(
    "message",
    [
        HELLO | {"duties": [(300, 300, 300)] * NUM},
        RESULTS | {"trajectories": [(0, 0, 0.0, "stop", 1, 1, 1)] * NUM},
        RESULTS | {"trajectories": [(0, 0, 0.0, "stop", 1, 1, 1, [300] * NUM)]},
        RESULTS | {"leases": [(300, 1)] * NUM},
        RESULTS | {"failed": [(1, 0, 0, "a", "", "")] * NUM},
    ],
    ids=["duties", "trajectories", "spans", "leases", "failed"],
)
def test_a_message_beyond_a_bound_takes_no_memory(message: dict[str, object]) -> None:
    frames = [sealed(msgspec.msgpack.encode(message)), *([b""] if message["type"] == "results" else [])]
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="of length <=") as refused:
            decode_worker(frames, Limits())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * len(frames[0])
    assert len(str(refused.value)) < 1000


def test_a_sample_with_more_turns_than_a_message_takes_begins_anew() -> None:
    one = np.ones(1, dtype=np.int32)
    turn = RecordedTurn(b"prompt", Completion(one, -one.astype(np.float32), one, "stop"))
    assert len(decode_turns(encode_turns([turn] * 2**10))) == 2**10
    assert encode_turns([turn] * (2**10 + 1)) == b""


def test_the_words_of_a_failure_are_those_of_an_honest_worker_at_most() -> None:
    """A record of each of many drops is kept."""
    detail = shortened("x" * 10_000 + "\n" + "y" * 10_000)
    for words, is_refused in ((detail, False), ("x" * 10_000, True)):
        frames = encode(Results("learner", 1, (), (Failed(1, 0, 0, "episode_error", words, "", 3),)))
        with pytest.raises(DecodeError, match="length <= 5000") if is_refused else contextlib.nullcontext():
            decode_worker(frames, Limits())


@pytest.mark.parametrize("num", [MOST_PARTIALS, MOST_PARTIALS + 1])
def test_a_message_has_few_partial_rollouts(num: int) -> None:
    """A turn without tokens takes 13 bytes, and as long to check as a thousand tokens."""
    frames = encode(Partials("learner", 0, tuple(Partial(1, 0, index, b"turns") for index in range(num)), True))
    with pytest.raises(DecodeError, match="of length <= 32") if num > 32 else contextlib.nullcontext():
        decode_worker(frames, Limits())


def test_a_partial_rollout_has_limited_bytes() -> None:
    one = np.ones(1, dtype=np.int32)
    turn = RecordedTurn(b"prompt", Completion(one, -one.astype(np.float32), one, "stop"))
    assert len(decode_turns(encode_turns([turn] * 3, most_tokens=3))) == 3
    assert encode_turns([turn] * 4, most_tokens=3) == b"", "the sample begins anew"
    with pytest.raises(DecodeError, match="length <= 16"):
        decode_turns(encode_turns([RecordedTurn(bytes(17), turn.completion)]))


def test_a_sample_with_more_versions_than_a_message_takes_begins_anew() -> None:
    def turn(num: int) -> RecordedTurn:
        versions = np.arange(num, dtype=np.int32)
        return RecordedTurn(b"prompt", Completion(versions, -np.ones(num, np.float32), versions, "stop"))

    whole = encode_turns([turn(2**11), turn(2**11)])
    assert len(decode_turns(whole)) == 2
    assert encode_turns([turn(2**11), turn(2**11), turn(1)]) == b""
    forged = msgspec.msgpack.encode([*msgspec.msgpack.decode(whole), *msgspec.msgpack.decode(encode_turns([turn(1)]))])
    with pytest.raises(DecodeError, match="expected at most 4096 runs of a version, got 4097"):
        decode_turns(forged)
