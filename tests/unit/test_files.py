"""Atomic writes on file systems that cannot flush folders, and scratch folders of killed processes."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from areal_rloo.files import ScratchFolder, move_into_place, open_private, remove_abandoned, write_atomically

MAKES_A_FOLDER = """
import os, signal, sys
from pathlib import Path
from areal_rloo.files import ScratchFolder
folder = ScratchFolder(Path(sys.argv[1]), "test")
(folder.path / "file").touch()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


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


@pytest.mark.parametrize("mode", ["wb", "ab"])
@pytest.mark.parametrize("is_older", [True, False])
def test_a_private_file_is_private_before_the_first_byte(
    tmp_path: Path, mode: Literal["wb", "ab"], is_older: bool
) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        tmp_path.chmod(0o777)
        if is_older:
            path.touch(mode=0o666)
        with open_private(path, mode) as file:
            assert path.stat().st_mode & 0o777 == 0o600
            file.write(b"key")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"key"


def test_scratch_folders_of_dead_processes_alone_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKES_A_FOLDER, str(tmp_path)]
    dead = Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip())
    living = ScratchFolder(tmp_path, "test")
    of_another_version = tmp_path / "areal_rloo-0123456789ab"
    of_another_version.mkdir()
    assert (dead / "file").exists()
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {living.path, of_another_version}
    assert living.path.stat().st_mode & 0o077 == 0
    living.close()
    assert not living.path.exists()


def test_folders_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "areal_rloo-test-of-the-dead"
    folder.mkdir()
    (folder / "lock").touch()
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    remove_abandoned(tmp_path)
    assert folder.is_dir()
    monkeypatch.undo()
    remove_abandoned(tmp_path)
    assert not folder.exists()
