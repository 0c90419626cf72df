"""Files that several processes read, write or lock.

A reader sees the whole old content or the whole new content, also after a crash of the writer or of the machine. A lock
ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import BaseFileLock, FileLock, Timeout


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file: the content first, then the name, both flushed to the disk.

    Raises:
        OSError: the disk refuses; the file keeps the old content.
    """
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file to write into, and move it to `path` at the end of the block unless the block raises."""
    unfinished = _unfinished(path)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move_into_place(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove the new content that a killed `replacing` left; call only if no process writes this file."""
    _unfinished(path).unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def move_into_place(unfinished: Path, final: Path) -> None:
    """Rename a file or folder and flush the new name to the disk.

    Raises:
        OSError: the disk refuses, or `final` is a folder with files in it.
    """
    unfinished.rename(final)
    flush_to_disk(final.parent)


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to the disk; a folder only where the file system can flush folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network and FUSE file systems refuse folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock_file(path: Path, *, timeout_s: float = 0.0, mode: int = 0o600) -> BaseFileLock | None:
    """Lock a file until `release`, or until this process ends; keep a reference to the lock meanwhile.

    Creates a missing file with this mode, and gives None after the timeout. Any thread may release the lock.

    Raises:
        OSError: the file cannot be opened, or the file system has no locks.
    """
    lock = FileLock(path, mode=mode, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        return None
    return lock
