"""Append records to a file, a line of JSON each, and remove the records after a checkpoint.

At every moment, also after a kill of the writer and on a full disk, the file has whole lines, and perhaps an incomplete
last line. Readers skip an incomplete line, and the next writer removes the line.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from areal_rloo.decoding import from_json
from areal_rloo.errors import CheckpointError, DecodeError
from areal_rloo.files import open_regular, remove_unfinished, replacing

_BLOCK_BYTES = 2**16


class RecordFile:
    """The writing end of a file of records."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        self._end = self._end_of_lines()
        self._remove_incomplete_line()

    def append(self, lines: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: the disk refuses. No reader sees any of these lines then.
        """
        self._remove_incomplete_line()
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._remove_incomplete_line()
            raise
        self._end += len(lines)

    @property
    def num_bytes(self) -> int:
        """Size of the whole lines."""
        return self._end

    def close(self) -> None:
        self._file.close()

    def _remove_incomplete_line(self) -> None:
        """Cut off the bytes of a failed append, or of a writer that was killed."""
        if self._file.seek(0, os.SEEK_END) > self._end:
            self._file.truncate(self._end)

    def _end_of_lines(self) -> int:
        """Search backwards for the end of the last whole line."""
        position = self._file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _BLOCK_BYTES)
            newline = os.pread(self._file.fileno(), position - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
        return 0


def cut_records(path: Path, policy_version: int) -> None:
    """Keep the records up to and including `policy_version`; a resumed run repeats the later steps.

    Records after the checkpoint are the end of the file, except for evaluations that took long. Cutting off the end
    needs no room on the disk. Otherwise, the kept records replace the file atomically. Records of other versions of
    areal_rloo stay as they are. Call only if no process writes the file.

    Raises:
        CheckpointError: the file cannot be read, or the disk has no room for the kept records. The file is unchanged.
    """
    remove_unfinished(path)
    if not path.exists():
        return
    try:
        end, is_end = _kept(path, policy_version)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; move the file away to resume") from error
    if is_end:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
        return
    try:
        with open_regular(path) as source, replacing(path) as target:
            target.writelines(line for line in source if _is_kept(line, policy_version))
    except OSError as error:
        raise CheckpointError(
            f"{path}: the records after version {policy_version} cannot be removed: {error}; free some disk, then "
            f"areal-rloo resume {path.parent}"
        ) from error


def thin_records(path: Path) -> None:
    """Remove every second version of the older three quarters, for a long run: the newest versions stay dense.

    The first version stays. The kept records replace the file atomically; a reader goes on with the old file. Open the
    writing end again after. Raises OSError if the disk refuses; the file is unchanged then.
    """
    with open_regular(path) as source:
        versions = sorted({version for line in source if (version := _version_of(line)) is not None})
    removed = set(versions[: len(versions) * 3 // 4][1::2])
    with open_regular(path) as source, replacing(path) as target:
        target.writelines(line for line in source if _version_of(line) not in removed)


def _kept(path: Path, policy_version: int) -> tuple[int, bool]:
    """Give the end of the first run of kept records, and True if no kept record follows."""
    end, position = 0, 0
    with open_regular(path) as file:
        for line in file:
            position += len(line)
            if _is_kept(line, policy_version):
                if end < position - len(line):
                    return end, False
                end = position
    return end, True


def _is_kept(line: bytes, policy_version: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    version = _version_of(line)
    return version is not None and version <= policy_version


def _version_of(line: bytes) -> float | None:
    """Read the version of a record; None if there is none."""
    try:
        return from_json(line, _Beginning).policy_version
    except DecodeError:
        return None


class _Beginning(msgspec.Struct):
    """The field that every record has."""

    policy_version: int
