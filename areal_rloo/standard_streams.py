"""The three standard streams of a process. Every program of the package calls `open_missing_streams` first."""

from __future__ import annotations

import os
import sys
from typing import TextIO, cast


def open_missing_streams() -> None:
    """Open /dev/null for each closed standard stream.

    A parent may start a program with closed streams (`<&-`). Then the next open file, such as a lock or a socket,
    becomes a standard stream: a line on standard error ends up in that file, and a child may close the file.
    """
    sys.stdin = _opened(0, sys.stdin, "r")
    sys.stdout = _opened(1, sys.stdout, "w")
    sys.stderr = _opened(2, sys.stderr, "w")


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
