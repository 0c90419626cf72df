"""The three standard streams of a process. Every program of the package calls `open_missing_streams` first."""

from __future__ import annotations

import io
import os
import sys
from datetime import UTC, datetime
from typing import TextIO, cast


def open_missing_streams() -> None:
    """Open /dev/null for each closed standard stream.

    A parent may start a program with closed streams (`<&-`). Then the next open file, such as a lock or a socket,
    becomes a standard stream: a line on standard error ends up in that file, and a child may close the file.
    """
    sys.stdin = _opened(0, sys.stdin, "r")
    sys.stdout = _opened(1, sys.stdout, "w")
    sys.stderr = _opened(2, sys.stderr, "w")


def stop_printing() -> None:
    """Discard all output, the buffered output too, because the reader of the pipe is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stamp_lines() -> None:
    """Begin each line on standard output and standard error with the time, for the output file of a batch job."""
    sys.stdout = cast("TextIO", _StampedLines(sys.stdout))
    sys.stderr = cast("TextIO", _StampedLines(sys.stderr))


class _StampedLines(io.TextIOBase):
    """A stream before another; the time is that of the first character of a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begins_line = stream, True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        stamped = []
        for line in text.splitlines(keepends=True):
            stamped.append(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}" if self._begins_line else line)
            self._begins_line = line.endswith("\n")
        self._stream.write("".join(stamped))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _opened(descriptor: int, stream: TextIO | None, mode: str) -> TextIO:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: the missing descriptor
        assert opened == descriptor, f"expected the descriptor {descriptor}, got {opened}"
        os.set_inheritable(descriptor, True)
    if stream is not None:
        return stream
    return cast("TextIO", os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
