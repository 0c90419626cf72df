"""Write and read a run folder's trajectories.jsonl: single trajectories, token by token.

The learner appends `TrajectoryRecord`s, a step at a time; `areal_rloo.inspect` reads them, even during a run. The file
may have gigabytes, so every function here reads line by line.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.decoding import from_json
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.files import open_regular
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.record_file import RecordFile, thin_records

logger = get_logger(__name__)

FILE_NAME = "trajectories.jsonl"  # in the run folder
_MOST_READ_BYTES = 2**24


class Token(msgspec.Struct, frozen=True, gc=False):
    """A token of a completion. `logprob` has no meaning if another party wrote the token."""

    text: str
    token_id: int
    logprob: float
    version: int
    by_policy: bool
    advantage: float | None


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that was trained on or dropped.

    A number that could not be measured is NaN inside lists and parts, null in the file.
    """

    policy_version: int  # learner's version when it was trained on or dropped
    group_id: int  # negative: evaluation (not recorded today)
    sample_index: int
    part_index: int = 0  # place among the trajectories of the sample
    source: str  # name of the data source
    epoch: int
    item_index: int  # place in the data
    expected: str = ""  # the answer in the data, the middle left out if long
    prompt: str  # decoded
    pieces: list[str]  # decoded text of each completion token
    token_ids: list[int]
    logprobs: list[float]  # of the behaviour policy; 0 for tokens of other parties
    versions: list[list[int]]  # runs: [policy version, number of completion tokens]
    spans: list[int]  # numbers of tokens by the policy and by others (tools, users), in turn; empty: all by the policy
    reward: float | None  # None: dropped without one
    reward_parts: dict[str, float]
    advantage: float | None  # mean over the tokens in the loss; None: not trained
    advantages: list[float] = []  # by token; empty if all are equal
    staleness: int | None  # of the stalest token when trained on
    num_masked_tokens: int = 0  # past the staleness bound, so out of the loss
    finish_reason: str
    dropped: str | None  # reason of the drop
    detail: str = ""  # of the drop, e.g. a traceback

    def __post_init__(self) -> None:
        """Refuse a record with lists of different lengths; readers iterate over them together."""
        for name, length in (
            ("token_ids", len(self.token_ids)),
            ("logprobs", len(self.logprobs)),
            ("versions", sum(count for _, count in self.versions)),
            ("spans", sum(self.spans) if self.spans else self.num_tokens),
            ("advantages", len(self.advantages) or self.num_tokens),
        ):
            if length != self.num_tokens:
                raise ValueError(f"{name}: expected {self.num_tokens} tokens as in pieces, got {length}")
        if min(*self.spans, *(count for _, count in self.versions), 0, 0) < 0:
            raise ValueError("versions and spans: expected counts of at least 0")

    @property
    def num_tokens(self) -> int:
        """Of the completion."""
        return len(self.pieces)

    @property
    def completion(self) -> str:
        return "".join(self.pieces)

    @property
    def name(self) -> str:
        """GROUP/INDEX; followed by .PART from the second part on."""
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
    """Appends to a trajectories.jsonl: a line per record, the lines of a step at once.

    If the disk is full, none of the lines of a step is written, and the OSError goes to the caller. If the file grows
    beyond `most_bytes`, older steps are thinned out (`thin_records`).
    """

    def __init__(self, path: Path, *, most_bytes: int = sys.maxsize) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: RecordFile | None = RecordFile(path)

    def append(self, records: Iterable[TrajectoryRecord]) -> None:
        self._file = self._file or RecordFile(self._path)
        self._file.append(b"".join(_line(record) for record in records))
        if self._file.num_bytes > self._most_bytes:
            self._thin(self._file)

    def _thin(self, file: RecordFile) -> None:
        self._file, num_bytes = None, file.num_bytes
        file.close()
        try:
            thin_records(self._path)
            self._file = RecordFile(self._path)  # else the next append tries again
            num_bytes = self._file.num_bytes
        except OSError as error:
            logger.warning("%s cannot be made smaller: %s", self._path, error)
        # If a few long steps fill the file, or the disk refuses, try again when the file has grown.
        self._most_bytes = max(self._most_bytes, num_bytes + num_bytes // 4)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TrajectoryTail:
    """Reads a trajectories.jsonl while it is written. After a resume or a thinning, the tail goes on at the end."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path, self._position = path, 0
        if from_end and path.exists():
            self._position = path.stat().st_size

    def read(self) -> list[TrajectoryRecord]:
        """Give the whole records since the last call; none of another version of areal_rloo, and at most 16 MiB."""
        if not self._path.exists():
            return []
        with open_regular(self._path) as file:
            self._position = min(self._position, os.fstat(file.fileno()).st_size)
            file.seek(self._position)
            block = file.read(_MOST_READ_BYTES)
        whole, newline, _ = block.rpartition(b"\n")
        # A line longer than a block is left out: the end alone is no record.
        self._position += len(block) if len(block) == _MOST_READ_BYTES and not newline else len(whole) + len(newline)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(DecodeError):
                found.append(from_json(line, TrajectoryRecord))
        return found


def read_trajectories(path: Path) -> Iterator[TrajectoryRecord]:
    """Read the records of a file in order, without an incomplete last line.

    Raises:
        DataError: the file cannot be read, or a whole line is not a record of this version.
    """
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield read_line(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_line(line: bytes, place: str = FILE_NAME) -> TrajectoryRecord:
    """Read a record; null among the numbers is NaN. Raises DataError, with the place, for any other line."""
    with contextlib.suppress(DecodeError):
        return from_json(line, TrajectoryRecord)
    try:
        values: Any = from_json(line, object)
    except DecodeError as error:
        advice = "take this line out to read the others"
        raise DataError(f"{place}: expected a record in JSON: {error}; {advice}") from error
    try:
        if isinstance(values, dict):
            for key in {"logprobs", "advantages"} & values.keys():
                values[key] = [math.nan if value is None else value for value in values[key]]
            parts = values.get("reward_parts", {}).items()
            values["reward_parts"] = {name: math.nan if value is None else value for name, value in parts}
        return msgspec.convert(values, TrajectoryRecord)
    except (msgspec.ValidationError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{place}: a record of another version of areal_rloo: {error}") from error


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
