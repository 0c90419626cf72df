"""Rows of a local data file, each with the place it stands at, for errors that can be mended.

jsonl, json (an array of objects), csv and parquet. `fields` renames: field of the task ─► field of the file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.errors import DataError

_MOST_LINE_BYTES = 64 * 2**20  # a longer line is a file that lost its line breaks

Row = dict[str, Any]
Located = tuple[str, Row]


def read_rows(path: str, fields: Mapping[str, str] | None = None) -> Iterator[Located]:
    """Rows of a file in order, each with its place (`file:line`, or `file: row n` where lines say nothing).

    Raises:
        DataError: names the file, the line, and what to do.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise DataError(f"{path}: expected a {', '.join(_READERS)} file, got '{file.suffix}'")
    places: dict[str | int, str] = {}
    empty = True
    for where, found in _told(reader, file):
        if not isinstance(found, dict):
            raise DataError(f"{where}: expected an object, got {type(found).__name__}")
        empty = False
        row = renamed(found, fields or {}, where)
        try:
            msgspec.msgpack.encode(row)  # as it will travel to the rollout workers
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{where}: a field cannot be sent to a rollout worker: {error}") from error
        if isinstance(row.get("id"), str | int) and places.setdefault(row["id"], where) != where:
            raise DataError(f"{where}: the field 'id' is {row['id']!r}, as in {places[row['id']]}; ids must differ")
        yield where, row
    if empty:
        raise DataError(f"{path}: no row in it")


def text_field(row: Row, field: str, where: str) -> str:
    """A field that has to be text.

    Raises:
        DataError: it is absent or something else; names the place and the field.
    """
    value = row.get(field)
    if not isinstance(value, str):
        got = f"{type(value).__name__}" if field in row else f"the fields {', '.join(map(str, row))}"
        raise DataError(f"{where}: expected text in the field '{field}', got {got}")
    return value


def renamed(row: Row, fields: Mapping[str, str], where: str) -> Row:
    """A row with the names its task knows beside its own.

    Raises:
        DataError: a field it should have is not there; names the place and the field.
    """
    for ours, theirs in fields.items():
        if theirs not in row:
            raise DataError(
                f"{where}: expected a field '{theirs}' (for {ours}), got the fields {', '.join(map(str, row))}"
            )
    return row | {ours: row[theirs] for ours, theirs in fields.items()}


def _told(reader: Callable[[Path], Iterator[tuple[str, Any]]], path: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield from reader(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > _MOST_LINE_BYTES:
                raise DataError(f"{where}: a line of more than {_MOST_LINE_BYTES} bytes; is this one object a line?")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from error
            yield where, text


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path):
        if line.strip():
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not valid JSON: {error}") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: expected an array of objects, got {type(rows).__name__}; for one a line, name it .jsonl"
        )
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    located = _lines(path)
    rows = csv.DictReader((text for _, text in located), strict=True)
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
        raise DataError(f"{path}: parquet needs pyarrow; install the extra: pip install 'areal-rloo[data]'") from error
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
