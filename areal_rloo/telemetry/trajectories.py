"""The run folder's trajectories.jsonl: what became of single trajectories, token by token.

The learner appends `TrajectoryRecord`s, a step at a time; `areal_rloo.inspect` reads them, also while they are being
written. Such a file may have gigabytes, so that everything here goes through it line by line.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.errors import DataError

FILE_NAME = "trajectories.jsonl"  # in the run folder


class Token(msgspec.Struct, frozen=True, gc=False):
    """One token of a completion. Where the policy did not write it, `logprob` says nothing."""

    text: str
    token_id: int
    logprob: float
    version: int
    by_policy: bool
    advantage: float | None


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory that was trained on or dropped.

    What could not be measured is NaN inside lists and parts, in the file null.
    """

    policy_version: int  # learner's version when it was trained on or dropped
    group_id: int  # negative: evaluation (not recorded today)
    sample_index: int
    part_index: int = 0  # which trajectory of the sample: it may give several
    source: str  # name of the data source
    epoch: int
    item_index: int  # place in the data
    prompt: str  # decoded
    pieces: list[str]  # decoded text of each completion token
    token_ids: list[int]
    logprobs: list[float]  # of the behaviour policy; 0 for tokens that the policy did not write
    versions: list[list[int]]  # runs: [policy version, number of completion tokens]
    spans: list[int]  # numbers of tokens by the policy and by others (tools, users), in turn; empty: all its own
    reward: float | None  # None: dropped without one
    reward_parts: dict[str, float]
    advantage: float | None  # mean over its tokens in the loss; None: not trained
    advantages: list[float] = []  # by token, only where they differ along the trajectory
    staleness: int | None  # of its stalest token when trained on
    num_masked_tokens: int = 0  # past the staleness bound, so out of the loss
    finish_reason: str
    dropped: str | None  # reason of the drop
    detail: str = ""  # of the drop, e.g. a traceback

    def __post_init__(self) -> None:
        """Refuse a record whose lists disagree; every reader goes through them in step."""
        lengths = {
            "token_ids": len(self.token_ids),
            "logprobs": len(self.logprobs),
            "versions": sum(count for _, count in self.versions),
            "spans": sum(self.spans) if self.spans else self.num_tokens,
            "advantages": len(self.advantages) if self.advantages else self.num_tokens,
        }
        for name, length in lengths.items():
            if length != self.num_tokens:
                raise ValueError(f"{name}: expected {self.num_tokens} tokens as in pieces, got {length}")

    @property
    def num_tokens(self) -> int:
        """Of the completion."""
        return len(self.pieces)

    @property
    def completion(self) -> str:
        return "".join(self.pieces)

    @property
    def name(self) -> str:
        """GROUP/INDEX, with the part behind it where it is not the first."""
        return f"{self.group_id}/{self.sample_index}" + (f".{self.part_index}" if self.part_index else "")

    def by_policy(self) -> Iterator[bool]:
        """True for each token that the policy wrote."""
        if not self.spans:
            return repeat(True, self.num_tokens)
        return chain.from_iterable(repeat(index % 2 == 0, count) for index, count in enumerate(self.spans))

    def tokens(self) -> Iterator[Token]:
        """The completion's tokens in order."""
        versions = chain.from_iterable(repeat(version, count) for version, count in self.versions)
        advantages = self.advantages or repeat(None, self.num_tokens)
        columns = (self.pieces, self.token_ids, self.logprobs, versions, self.by_policy(), advantages)
        for values in zip(*columns, strict=True):
            yield Token(*values)


class TrajectoryFile:
    """Appends to a trajectories.jsonl: one line a record, the lines of a step at once.

    An OSError is the caller's to judge; what a full disk took of a step by then is taken back, so that the file stays
    whole.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, records: Iterable[TrajectoryRecord]) -> None:
        """Write the records of a step."""
        start = self._file.seek(0, os.SEEK_END)
        rest = memoryview(b"".join(_line(record) for record in records))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise

    def close(self) -> None:
        self._file.close()


def cut_trajectories(path: Path, policy_version: int) -> None:
    """Keep the records up to `policy_version`, itself included: on a resume, what came later did not happen.

    Lines that a killed writer has cut go too. The file is replaced in one move, so that a reader has the one or the
    other; records of other versions of areal_rloo stay as they are.
    """
    if not path.exists():
        return
    kept = path.with_name(f".{path.name}.unfinished")
    with path.open("rb") as source, kept.open("wb") as target:
        for line in source:
            if line.endswith(b"\n") and _policy_version(line) <= policy_version:
                target.write(line)
        target.flush()
        os.fsync(target.fileno())
    kept.replace(path)


def read_trajectories(path: Path) -> Iterator[TrajectoryRecord]:
    """The records of a file in its order; a last line that is not whole is left out.

    Raises:
        DataError: the file cannot be read, or a line is whole and no record of this version.
    """
    decoder = msgspec.json.Decoder(TrajectoryRecord)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decoder.decode(line)
                except msgspec.ValidationError:
                    yield _with_gaps(line, path, number)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise DataError(
                        f"{path}:{number}: expected a record in JSON: {error}; take this line out to read the others"
                    ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


class _Beginning(msgspec.Struct, frozen=True):
    """What is needed of a line to know whether it stays."""

    policy_version: int


def _policy_version(line: bytes) -> float:
    try:
        return msgspec.json.decode(line, type=_Beginning).policy_version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return math.inf


def _with_gaps(line: bytes, path: Path, number: int) -> TrajectoryRecord:
    """A record with null among its numbers: JSON has no NaN."""
    values: Any = msgspec.json.decode(line)
    try:
        if isinstance(values, dict):
            for key in {"logprobs", "advantages"} & values.keys():
                values[key] = [math.nan if value is None else value for value in values[key]]
            parts = values.get("reward_parts", {}).items()
            values["reward_parts"] = {name: math.nan if value is None else value for name, value in parts}
        return msgspec.convert(values, TrajectoryRecord)
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise DataError(f"{path}:{number}: a record of another version of areal_rloo: {error}") from error


def _line(record: TrajectoryRecord) -> bytes:
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, out of a data file or the message of an exception
        return msgspec.json.encode(_encodable(msgspec.to_builtins(record))) + b"\n"


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case list():
            return [_encodable(item) for item in value]
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value
