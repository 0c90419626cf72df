"""The three standard streams of a process. Every program of the package calls `open_missing_streams` first."""

from __future__ import annotations

import io
import os
import stat
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import TextIO, cast

_PATIENCE_S = 1.0  # for a reader that stands still
_MOST_BYTES = 2**16  # that wait for such a reader


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


def patient(stream: TextIO) -> TextIO:
    """Give a stream whose writes do not wait for a reader that stands still, as after Ctrl-S or on a stalled ssh.

    A stream that cannot stand still, such as a file, is given back as it is.
    """
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # a test's stream has no descriptor
        return stream
    stands_still = stream.isatty() or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    if not (isinstance(stream, io.TextIOWrapper) and stands_still):
        return stream
    stream.flush()
    return cast("TextIO", _PatientStream(stream))


class _PatientStream(io.TextIOBase):
    """A stream before a terminal or a pipe; a thread writes. What a reader without end of its pause misses, is lost.

    The thread writes to the descriptor: the end of the process must not wait for the lock of a buffer.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._waiting = deque[bytes]()  # the first is being written
        self._changed = threading.Condition()
        self._stands_still = False
        self._error: OSError | None = None
        threading.Thread(target=self._write_all, name="terminal", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        encoded = text.encode(self._stream.encoding, self._stream.errors or "strict")
        with self._changed:
            if encoded and sum(map(len, self._waiting)) <= _MOST_BYTES:
                self._waiting.append(encoded)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Wait for the reader, but not again while the reader stands still.

        Raises:
            OSError: the reader is gone, or the device refuses.
        """
        with self._changed:
            if not self._stands_still:
                self._stands_still = not self._changed.wait_for(lambda: not self._waiting, _PATIENCE_S)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                rest = memoryview(self._waiting[0])
            try:
                while rest:
                    rest = rest[os.write(self._stream.fileno(), rest) :]
            except OSError as error:
                self._error = error
            with self._changed:
                self._waiting.popleft()
                self._stands_still = self._stands_still and bool(self._waiting)
                self._changed.notify_all()


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
