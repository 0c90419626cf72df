"""Rows of a source, from a local file or the hub, each with a place for error messages; and the tasks made of rows.

The task `rows` takes your own prompts, a row each, scored by your own rewards. Rewards receive every field of the row:

    {"prompt": "...", "answer": "..."}        or "prompt": [{"role": "user", "content": "..."}, ...]; "answer" may lack

Files: jsonl, json (an array of objects), csv and parquet. `fields` renames: field of the task ─► field of the file, or
a path to a nested field. The `datasets` library reads the hub and caches downloads; with HF_HUB_OFFLINE=1 the library
reads only the cache.
"""

from __future__ import annotations

import csv
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError, SourceError, install
from areal_rloo.files import open_regular
from areal_rloo.tasks.base import Item, Message, Split, Task, check_parameters
from areal_rloo.tasks.sendable import check_sendable

_MOST_LINE_BYTES = 64 * 2**20  # a longer line means a file without line breaks
_STEP = re.compile(r"[^.\[\]]+")  # of the path to a nested field
_MOST_DIGITS = 9  # of an index

Row = dict[str, Any]
Located = tuple[str, Row]


class RowTask(Task):
    """A task whose items are rows."""

    hub: ClassVar[str | None] = None  # the default dataset, as `org/name` or `org/name:config`
    eval_hub: ClassVar[str | None] = None  # if the dataset for evaluation is another than `hub`
    defaults: ClassVar[Mapping[str, Any]] = {}  # the parameters

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        del seed
        self.parameters = check_parameters(source, self.defaults)
        self._source = source

    @abstractmethod
    def item(self, row: Row, where: str) -> Item:
        """Make the item of a row; raise DataError if a field is wrong."""

    def items(self, split: Split) -> Sequence[Item]:
        return [self.item(row, where) for where, row in self._rows(split)]

    def dataset(self, split: Split) -> str | None:
        """Name the hub dataset of a source without a file; None if there is none."""
        return self._source.hub or (self.eval_hub if split == "eval" else None) or self.hub

    def _rows(self, split: Split) -> Iterator[Located]:
        """Read the source's file, else the source's dataset, else the task's dataset."""
        source = self._source
        if source.path is not None:
            return rows_of_file(source.path, source.fields)
        name = self.dataset(split)
        if name is None:
            raise SourceError(f"path: the task {source.task} needs a file or a hub dataset; set path or hub")
        hub_split = source.hub_split or ("train" if split == "train" else "test")
        return _from_hub(name, hub_split, source.fields, "path" if source.hub is None else "hub")


class RowsTask(RowTask):
    """The task `rows`. It has no reward, so the source must name rewards."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        super().__init__(source, seed)
        if not source.rewards or any(reward.task == source.task for reward in source.rewards):
            raise SourceError(
                "task: rows has no reward of its own; name one under rewards, for example "
                "rewards: [{function: my_rewards.py:score}]; for areal-rloo sft, take the task demonstrations"
            )

    def reward(self, completion: str, item: Item) -> float:
        raise AssertionError("a source that asks for this is refused when the task is made")

    def item(self, row: Row, where: str) -> Item:
        prompt = prompt_of(row, where)
        return Item(prompt, "" if row.get("answer") is None else str(row["answer"]), fields=row)


def prompt_of(row: Row, where: str) -> str | tuple[Message, ...]:
    """Return the field 'prompt' of a row: a text, or messages that the policy can continue.

    Raises:
        DataError: the field is absent or something else; names the place.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        messages = messages_of(row, "prompt", where)
        if not messages or messages[-1].role == "assistant":
            raise DataError(f"{where}: expected a conversation that the policy can continue in the field 'prompt'")
        return messages
    if not isinstance(prompt, str) or not prompt:
        got = type(prompt).__name__ if "prompt" in row else f"the fields {', '.join(map(str, row))}"
        got = "an empty text" if prompt == "" else got
        raise DataError(f"{where}: expected a text or messages in the field 'prompt', got {got}")
    return prompt


def messages_of(row: Row, field: str, where: str) -> tuple[Message, ...]:
    """Return a field of a row as messages; raise DataError if they are something else."""
    given = row[field]
    cleaned = [_without_nulls(message) for message in given] if isinstance(given, list) else given
    try:
        return msgspec.convert(cleaned, tuple[Message, ...])
    except msgspec.ValidationError as error:
        expected = f"expected messages of role and content in the field '{field}'"
        raise DataError(f"{where}: {expected}: {error}") from error


def _without_nulls(message: Any) -> Any:
    """Leave out absent keys of a message: parquet has all keys of all messages."""
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message


def _from_hub(name: str, hub_split: str, fields: Mapping[str, str], key: str) -> Iterator[Located]:
    try:
        import datasets  # noqa: PLC0415 - an extra, imported where it is used
    except ImportError as error:
        means = "null means the hub" if key == "path" else "a dataset of the hub"
        raise SourceError(
            f"{key}: {means} ({name}), which needs the `datasets` library; set path to a local file, or install the "
            f"extra: {install('data')}",
            absent=True,
        ) from error
    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split=hub_split)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceError(
            f"{key}: cannot read {name} (split {hub_split}) from the hub or the cache of earlier downloads "
            f"({type(error).__name__}: {reason}); set path to a local file"
        ) from error
    for number, row in enumerate(rows, start=1):
        where = f"{name}: {hub_split}: row {number}"
        renamed = _renamed(row, fields, where)
        check_sendable(renamed, where)
        yield where, renamed


def rows_of_file(path: str, fields: Mapping[str, str]) -> Iterator[Located]:
    """Yield the rows of a file in order, each with a place: `file:line`, or `file: row n` for json and parquet."""
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise DataError(f"{path}: expected a {', '.join(_READERS)} file, got '{file.suffix}'")
    places: dict[str | int, str] = {}
    where = None
    try:
        for where, found in reader(file):
            if not isinstance(found, dict):
                raise DataError(f"{where}: expected an object, got {type(found).__name__}")
            row = _renamed(found, fields, where)
            check_sendable(row, where)
            if isinstance(row.get("id"), str | int) and places.setdefault(row["id"], where) != where:
                raise DataError(f"{where}: the field 'id' is {row['id']!r}, as in {places[row['id']]}; ids must differ")
            yield where, row
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if where is None:
        raise DataError(f"{path}: no row in it")


def text_field(row: Row, field: str, where: str) -> str:
    """Return a text field of a row.

    Raises:
        DataError: the field is absent or not text; names the place and the field.
    """
    value = row.get(field)
    if not isinstance(value, str):
        got = f"{type(value).__name__}" if field in row else f"the fields {', '.join(map(str, row))}"
        raise DataError(f"{where}: expected text in the field '{field}', got {got}")
    return value


def _renamed(row: Row, fields: Mapping[str, str], where: str) -> Row:
    """Copy renamed fields of a row under the names of the task."""
    return row | {
        ours: _field(row, theirs, f"{where}: expected a field '{theirs}' (for {ours})")
        for ours, theirs in fields.items()
    }


def _field(row: Row, path: str, expected: str) -> Any:
    """Return a field of this name, or at this path into mappings and lists, as `a.b` or `a[0].b`.

    Raises:
        DataError: a step of the path is missing; names the step, and the fields that are there.
    """
    if path in row:
        return row[path]
    value: Any = row
    steps = _STEP.findall(path) or [path]
    for number, step in enumerate(steps):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and len(step) <= _MOST_DIGITS and int(step) < len(value):
            value = value[int(step)]
        else:
            inside = f" in '{'.'.join(steps[:number])}'" if number else ""
            raise DataError(f"{expected}, got {_described(value)}{inside}")
    return value


def _described(value: Any) -> str:
    match value:
        case dict():
            return f"the fields {', '.join(map(str, value))}"
        case list():
            return f"a list of {len(value)}"
        case None:
            return "null"
        case _:
            return type(value).__name__


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), start=1):
            where = f"{path}:{number}"
            if len(line) > _MOST_LINE_BYTES:
                raise DataError(f"{where}: a line of more than {_MOST_LINE_BYTES} bytes; expected one object per line")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
            yield where, text


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path):
        if line.strip():
            try:
                yield where, json.loads(line.rstrip())
            except json.JSONDecodeError as error:  # the line is 1
                raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not valid JSON: {error}") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with open_regular(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        got = f"got {type(rows).__name__}; for an object per line, name the file .jsonl"
        raise DataError(f"{path}: expected an array of objects, {got}")
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    rows = csv.DictReader((text for _, text in _lines(path)), strict=True)
    try:
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where}: expected {len(rows.fieldnames or ())} columns as in the first line")
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num + 1}: not valid CSV: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow  # noqa: PLC0415 - an extra, imported where it is used
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        words = f"{path}: parquet needs pyarrow; install the extra: {install('data')}"
        raise DataError(words, absent=True) from error
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
