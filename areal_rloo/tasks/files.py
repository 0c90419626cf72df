"""Rows of a local data file, each a mapping of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_rloo.errors import DataError


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a jsonl or parquet file, in order.

    Raises:
        DataError: names the file, the line, and what to do.
    """
    file = Path(path)
    match file.suffix:
        case ".jsonl":
            return _jsonl(file)
        case ".parquet":
            return _parquet(file)
        case suffix:
            raise DataError(f"{path}: expected a .jsonl or .parquet file, got '{suffix}'")


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected an object, got {type(row).__name__}")
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow  # noqa: PLC0415 - an extra, imported where it is used
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow; install the extra: pip install 'areal-rloo[data]'") from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    yield from rows
