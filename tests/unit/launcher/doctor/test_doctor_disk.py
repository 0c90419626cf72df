"""Folders, disks, shared memory and clocks, each made to fail."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.situations import HUGE, config, found, only

from areal_rloo.launcher.doctor import Situation
from areal_rloo.launcher.doctor.disk import (
    check_clock,
    check_free_disk,
    check_run_folder,
    check_shared_memory,
    clock_finding,
    file_system,
)
from areal_rloo.launcher.doctor.limits import (
    check_memory,
)


def test_the_check_of_a_run_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    said = only(check_run_folder, "wrong", folder=Path("/proc/run")).what
    assert said in {f"/proc/run cannot be written: {why}" for why in ("proc takes no new files", "Permission denied")}
    assert only(check_run_folder, "ok", folder=tmp_path / "a" / "b")
    assert only(check_clock, "ok", folder=tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    full = tmp_path / "file"
    full.touch()
    assert "cannot be written" in only(check_run_folder, "wrong", folder=full).what


def test_an_object_store_is_unsure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    monkeypatch.setattr("areal_rloo.launcher.doctor.disk._OBJECT_STORES", (file_system(tmp_path),))
    assert "rename may be seen late" in only(check_run_folder, "unsure", folder=tmp_path).what


def test_a_file_system_without_locks_is_unsure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError("Function not implemented")  # what Lustre says that is mounted without locks

    monkeypatch.setattr("fcntl.flock", refuse)
    assert "does not lock files" in only(check_run_folder, "unsure", folder=tmp_path).what


def test_a_disk_without_room_for_a_checkpoint_is_wrong(tmp_path: Path, huge_model: Path) -> None:
    least = f"launcher.min_free_disk_bytes={10**18}"
    assert (
        f"expected launcher.min_free_disk_bytes={10**18} or more"
        in only(check_free_disk, "wrong", least, folder=tmp_path).what
    )
    finding = only(check_free_disk, "wrong", f"model.path={huge_model}", folder=tmp_path)
    assert "not one fits" in finding.what
    assert only(check_free_disk, "ok", folder=tmp_path / "not" / "there")


def test_weights_larger_than_the_memory_are_wrong(huge_model: Path) -> None:
    huge = f"model.path={huge_model}"
    assert "two versions of the weights" in only(check_shared_memory, "wrong", huge).what
    assert found(check_shared_memory, huge, "weights.transport=collective") == []
    assert "a run takes about" in only(check_memory, "wrong", huge).what
    assert only(check_memory, "ok").name == "memory"


def _usage(free_bytes: int) -> Callable[[Path], Any]:
    """Stands in for `shutil.disk_usage` on a disk with so much room."""
    return lambda _: SimpleNamespace(total=10**15, free=free_bytes)


def test_room_for_a_single_checkpoint_is_unsure(huge_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some 16 bytes a parameter; two segments of 4 bytes fit, and three do not."""
    huge = f"model.path={huge_model}"
    monkeypatch.setattr("shutil.disk_usage", _usage(30 * HUGE))
    assert "the 3 to keep and the next need" in only(check_free_disk, "unsure", huge, folder=huge_model).what
    for options, num_kept in (
        (("checkpoint.keep_best=false",), 2),
        (("data.eval=null", "evaluation.every_n_versions=0"), 2),
        (("checkpoint.every_n_steps=5", "checkpoint.keep_every_n_steps=10", "learner.num_train_steps=50"), 8),
    ):
        finding = only(check_free_disk, "unsure", huge, *options, folder=huge_model)
        assert f"the {num_kept} to keep" in finding.what
    monkeypatch.setattr("shutil.disk_usage", _usage(10 * HUGE))
    assert "with a slow worker" in only(check_shared_memory, "unsure", huge).what
    monkeypatch.setattr("shutil.disk_usage", _usage(13 * HUGE))
    assert only(check_shared_memory, "ok", huge)
    monkeypatch.setattr("shutil.disk_usage", _usage(64 * 2**20))  # what a container gets
    situation = Situation()
    (finding,) = check_shared_memory(situation)
    assert (finding.state, "--shm-size" in finding.fix) == ("unsure", True)
    monkeypatch.setattr("shutil.disk_usage", _usage(2**20))
    assert "two versions of the weights take 2.931 MiB" in only(check_shared_memory, "wrong").what


def test_missing_inodes_and_a_closed_shared_memory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_files=10**6, f_favail=3))
    monkeypatch.setattr("shutil.disk_usage", _usage(10**15))
    assert "has room for 3 files" in only(check_free_disk, "wrong", folder=tmp_path).what
    monkeypatch.setattr("areal_rloo.launcher.doctor.disk.memory_folder", lambda: tmp_path)
    assert (
        only(check_shared_memory, "unsure").what == f"/dev/shm cannot be written; weights would go through {tmp_path}"
    )


def test_a_clock_with_an_offset_is_unsure_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [clock_finding(s).state for s in (1.0, -10.0, 3600.0)] == ["ok", "unsure", "wrong"]
    real = time.time  # noqa: TID251 - a clock is what is turned
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert "3.6e+03 s ahead of this host" in only(check_clock, "wrong", folder=tmp_path).what


def test_a_login_node_does_not_check_unmounted_disks() -> None:
    submitting = Situation(config(), Path("/nowhere/shared/run"), runs_here=False)
    (finding,) = check_run_folder(submitting)
    assert finding.state == "unsure"
    assert not [*check_free_disk(submitting), *check_clock(submitting)]
    assert not Path("/nowhere").exists()
