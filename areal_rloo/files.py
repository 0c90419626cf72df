"""Files that several processes read, write or lock.

A reader sees the whole old content or the whole new content, also after a crash of the writer or of the machine. A lock
ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal

from filelock import BaseFileLock, FileLock, Timeout

_MEMORY = Path("/dev/shm")
_PREFIX = "areal_rloo-"
_LOCK = "lock"
_PIECE_BYTES = 2**30
_REMOVAL_S = 10.0  # a removal takes milliseconds
MOST_BYTES = 64 * 2**20  # of a file that describes others: far more than the index of the largest model


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


def open_private(path: Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file for a secret: only the owner can read the file, from the first byte, in a folder of any mode."""

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o600)
        os.fchmod(descriptor, 0o600)  # an older file keeps the old mode
        return descriptor

    return open(path, mode, opener=opened)


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. A pipe would block, and a device may have no end.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # Python refuses a folder
            os.close(descriptor)
            raise OSError(errno.EINVAL, "expected a regular file", name)
        return descriptor

    return open(path, "rb", opener=opened)


def read_regular(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a regular file that has a limited size.

    Raises:
        OSError: the file cannot be read, is no regular file, or is longer.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes", str(path))
    return content


def use_umask(path: Path) -> None:
    """Give a file the mode of any new file of this process; safetensors gives only the owner access."""
    sample = path.with_name(f".{path.name}.mode")
    sample.touch()
    path.chmod(stat.S_IMODE(sample.stat().st_mode))
    sample.unlink()


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


def memory_folder() -> Path:
    """Return the folder for files in memory; the folder for temporary files if this host has none."""
    return _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


class ScratchFolder:
    """An owner-only folder that lives as long as this process. A lock in the folder ends with the process.

    After a crash, `remove_abandoned` of another process removes the folder.
    """

    def __init__(self, parent: Path, name: str) -> None:
        """Make a folder whose name begins with the package and `name`.

        Raises:
            OSError: the folder cannot be made, or its file system has no locks.
        """
        parent.mkdir(parents=True, exist_ok=True)
        self._lock: BaseFileLock | None = None
        while self._lock is None:  # another process may remove a folder that is not locked yet
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-", dir=parent))
            try:
                self._lock = lock_file(self.path / _LOCK)
            except FileNotFoundError:
                continue
            except OSError:  # without a lock, nothing would ever remove the folder; there may be no descriptor
                with contextlib.suppress(OSError):
                    (self.path / _LOCK).unlink(missing_ok=True)
                    self.path.rmdir()
                raise

    def close(self) -> None:
        _remove_scratch(self.path)
        assert self._lock is not None, "the constructor locks"
        self._lock.release()


class SharedFolder:
    """An owner-only folder in memory that several processes name, and that lives as long as any of them.

    Every process has a shared lock there. `remove_abandoned` removes the folder after the last process.
    """

    def __init__(self, name: str) -> None:
        """Make the folder, or join the folder that another process made; the path begins with the package and `name`.

        Raises:
            OSError: the folder cannot be made, is another user's, is still being removed after some seconds, or its
                file system has no locks.
        """
        self.path = memory_folder() / f"{_PREFIX}{name}"
        self._lock, ends_s = -1, time.monotonic() + _REMOVAL_S
        while self._lock < 0:
            if time.monotonic() > ends_s:  # by a stopped process
                raise BlockingIOError(errno.EAGAIN, "another process has locked the folder", str(self.path))
            self._lock = self._joined()

    def open(self, name: str) -> int:
        """Open a file of the folder to read and write, and make the file if there is none; return the descriptor."""
        with _scratch_opened(self.path) as inside:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=inside)

    def close(self) -> None:
        """Leave the folder; the last process removes the folder."""
        os.close(self._lock)
        remove_abandoned(self.path.parent)

    def _joined(self) -> int:
        """Make the folder if there is none, and lock it; return as `_locked` does."""
        made = False
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            made = True
        try:
            return self._locked()
        except FileNotFoundError:
            return -1  # removed meanwhile
        except OSError:
            if made:
                with contextlib.suppress(OSError):
                    self.path.rmdir()  # empty: without a lock, no process would ever remove it
            raise

    def _locked(self) -> int:
        """Return the descriptor of the lock; -1 if the folder was removed before the lock."""
        descriptor = self.open(_LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing the folder
            os.close(descriptor)
            return -1
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return -1
        return descriptor


def _remove_scratch(folder: Path) -> None:
    """Remove a scratch folder, the lock last: as long as anything is left, `remove_abandoned` finds the folder."""
    with contextlib.suppress(OSError), _scratch_opened(folder) as inside:
        _remove_from(inside, folder)


def _remove_from(inside: int, folder: Path) -> None:
    for name in os.listdir(inside):
        if stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=inside)
        elif name != _LOCK:
            os.unlink(name, dir_fd=inside)
    if os.listdir(inside) == [_LOCK]:
        os.unlink(_LOCK, dir_fd=inside)
        folder.rmdir()  # not a link


def remove_abandoned(*parents: Path) -> None:
    """Remove the scratch folders of dead processes of this user; without parents, all of this host."""
    for parent in set(parents or (_MEMORY, Path(tempfile.gettempdir()))):
        for folder in parent.glob(f"{_PREFIX}*"):
            with (
                contextlib.suppress(OSError),  # removed meanwhile
                _scratch_opened(folder) as inside,
                _opened(_LOCK, os.O_RDWR | os.O_NONBLOCK, inside) as lock,
            ):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the process lives
                if os.fstat(lock).st_nlink:  # else another process removed this lock, and the next lock is not ours
                    _remove_from(inside, folder)


@contextlib.contextmanager
def _scratch_opened(folder: Path) -> Iterator[int]:
    """Open a scratch folder of this user. The name is in a folder where every user makes names, so it proves nothing.

    Raises:
        OSError: the name is a link or not a folder, or the folder is another user's or open to others.
    """
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "not a scratch folder of this user", str(folder))
        yield descriptor


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def in_pieces(content: bytes | memoryview) -> tuple[bytes, ...]:
    """Cut bytes for a msgpack file: a single value must be shorter than 4 GiB, and a checkpoint may be longer."""
    return tuple(bytes(content[at : at + _PIECE_BYTES]) for at in range(0, len(content), _PIECE_BYTES))


def of_pieces(pieces: Sequence[bytes]) -> bytes:
    """Put the pieces together again."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
