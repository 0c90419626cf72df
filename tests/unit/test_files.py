"""Atomic writes on file systems that cannot flush folders, and scratch folders of killed processes."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from areal_rloo import files
from areal_rloo.files import (
    ScratchFolder,
    SharedFolder,
    move_into_place,
    open_private,
    open_regular,
    read_regular,
    remove_abandoned,
    write_atomically,
)

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


def _abandoned(folder: Path) -> Path:
    """Make the scratch folder of a dead process, with a file inside."""
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    (folder / "file").touch()
    return folder


def test_folders_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _abandoned(tmp_path / "areal_rloo-test-of-the-dead")
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    remove_abandoned(tmp_path)
    assert set(folder.iterdir()) == {folder / "lock", folder / "file"}
    monkeypatch.undo()
    remove_abandoned(tmp_path)
    assert not folder.exists()


def test_a_link_to_a_folder_with_a_lock_removes_nothing(tmp_path: Path) -> None:
    shared, home = tmp_path / "shared", _abandoned(tmp_path / "home")
    shared.mkdir()
    (shared / "areal_rloo-x").symlink_to(home)
    remove_abandoned(shared)
    assert set(home.iterdir()) == {home / "lock", home / "file"}


def test_a_folder_that_others_can_enter_is_left_alone(tmp_path: Path) -> None:
    folder = _abandoned(tmp_path / "areal_rloo-x")
    folder.chmod(0o750)
    remove_abandoned(tmp_path)
    assert (folder / "file").exists()


@pytest.mark.parametrize("name", ["lock", "other"])
def test_links_in_an_abandoned_folder_are_not_followed(tmp_path: Path, name: str) -> None:
    shared, home = tmp_path / "shared", _abandoned(tmp_path / "home")
    shared.mkdir()
    folder = _abandoned(shared / "areal_rloo-x")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(home / "lock" if name == "lock" else home)
    remove_abandoned(shared)
    assert folder.exists() == (name == "lock"), "a link is no lock"
    assert set(home.iterdir()) == {home / "lock", home / "file"}


def test_a_scratch_folder_replaced_by_a_link_removes_nothing(tmp_path: Path) -> None:
    home, folder = _abandoned(tmp_path / "home"), ScratchFolder(tmp_path, "test")
    folder.path.rename(tmp_path / "moved")
    folder.path.symlink_to(home)
    folder.close()
    assert set(home.iterdir()) == {home / "lock", home / "file"}


def test_a_shared_folder_stays_while_any_process_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    first, second = SharedFolder("test"), SharedFolder("test")
    assert first.path == second.path == tmp_path / "areal_rloo-test"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    descriptor = first.open("file")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    first.close()
    remove_abandoned(tmp_path)
    assert (second.path / "file").exists()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_shared_folder_is_never_removed_under_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEMORY", tmp_path)

    def join_and_leave(_: int) -> bool:
        there = []
        for _ in range(100):
            folder = SharedFolder("test")
            os.close(folder.open("file"))
            there.append((folder.path / "file").exists())
            folder.close()
        return all(there)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(join_and_leave, range(4)))
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_removed_folder_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    path, lock, joined = tmp_path / "areal_rloo-test", fcntl.flock, []
    path.mkdir(mode=0o700)
    (path / "lock").touch()  # of a dead process

    def late_lock(descriptor: int, operation: int) -> None:
        """Give the old lock only after another process has removed it and a third one has joined the folder."""
        if operation & fcntl.LOCK_EX and not joined:
            (path / "lock").unlink()
            joined.append(SharedFolder("test"))
            os.close(joined[0].open("file"))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late_lock)
    remove_abandoned(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == ["file", "lock"]
    joined[0].close()
    assert list(tmp_path.iterdir()) == []


def test_a_shared_folder_that_stays_locked_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    monkeypatch.setattr(files, "_REMOVAL_S", 0.05)
    (tmp_path / "areal_rloo-test").mkdir(mode=0o700)
    with (tmp_path / "areal_rloo-test" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of a process that was stopped during the removal
        with pytest.raises(BlockingIOError, match="another process has locked the folder"):
            SharedFolder("test")
    SharedFolder("test").close()


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_shared_folder_of_others_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MEMORY", tmp_path)
    path, home = tmp_path / "areal_rloo-test", tmp_path / "home"
    home.mkdir()
    if kind == "open":
        path.mkdir()
        path.chmod(0o755)
    elif kind == "link":
        path.symlink_to(home)
    else:
        path.touch()
    with pytest.raises(OSError, match="areal_rloo-test"):
        SharedFolder("test")
    assert list(home.iterdir()) == []


def test_a_pipe_and_a_device_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        for read in (open_regular, read_regular):
            with pytest.raises(OSError, match="expected a regular file"):
                read(tmp_path / name)


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="expected at most 4 bytes"):
        read_regular(tmp_path / "file", most_bytes=4)
