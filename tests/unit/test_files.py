"""Atomic writes on file systems that cannot flush folders."""

import errno
import os
import stat
from pathlib import Path

import pytest

from areal_rloo.files import move_into_place, write_atomically


def _refuse(monkeypatch: pytest.MonkeyPatch, kind: int, number: int) -> None:
    """Let fsync fail for files (stat.S_IFREG) or for folders (stat.S_IFDIR), as some network file systems do."""
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_flushed_takes_files_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _refuse(monkeypatch, stat.S_IFDIR, number)
    write_atomically(tmp_path / "a", b"content")
    (tmp_path / "unfinished").mkdir()
    move_into_place(tmp_path / "unfinished", tmp_path / "final")
    assert (tmp_path / "a").read_bytes() == b"content"
    assert (tmp_path / "final").is_dir()


@pytest.mark.parametrize(
    ("kind", "number"), [(stat.S_IFREG, errno.EINVAL), (stat.S_IFDIR, errno.EIO), (stat.S_IFREG, errno.ENOSPC)]
)
def test_any_other_failed_flush_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, number: int
) -> None:
    _refuse(monkeypatch, kind, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_atomically(tmp_path / "a", b"content")
