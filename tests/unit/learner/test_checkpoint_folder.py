"""The names of checkpoints, their order, and the rest of a killed learner."""

import math
import shutil
from pathlib import Path

import pytest

from areal_rloo.learner.checkpoint_folder import (
    checkpoint_path,
    checkpoint_statistics,
    finish,
    list_checkpoints,
    prune,
    recover,
    room_for_one,
    set_aside,
    standing,
    unfinished_checkpoints,
    unfinished_path,
    version_of,
)


def _make(folder: Path, *versions: int) -> None:
    for version in versions:
        (checkpoint_path(folder, version) / "shards").mkdir(parents=True)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_checkpoints_are_in_the_order_of_their_versions(tmp_path: Path) -> None:
    _make(tmp_path, 1_000_000, 999_999, 4)
    assert list(list_checkpoints(tmp_path)) == [4, 999_999, 1_000_000]
    assert standing(tmp_path).newest_version == 1_000_000


@pytest.mark.parametrize(
    "name",
    [
        "step-000004 (copy)",
        "step-4",
        "step-0000004",
        "step-000004-2",
        "step--00004",
        "step-00000\u0664",
    ],
)
def test_another_name_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "step-000005").touch()  # a file
    assert version_of(tmp_path / name) is None
    assert list_checkpoints(tmp_path) == {}


def test_a_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    recover(folder)
    assert list_checkpoints(folder) == {}
    assert standing(folder) == (0, -1)


def test_pruning_counts_back_from_the_newest_and_spares_later_versions(tmp_path: Path) -> None:
    _make(tmp_path, 10, 20, 30, 42, 50)
    prune(checkpoint_path(tmp_path, 42), keep=2)
    assert list(list_checkpoints(tmp_path)) == [30, 42, 50]
    prune(checkpoint_path(tmp_path, 42), keep=1)
    prune(checkpoint_path(tmp_path, 42), keep=1)
    assert _names(tmp_path) == {"step-000042", "step-000050"}


def test_pruning_spares_versions_however_old(tmp_path: Path) -> None:
    _make(tmp_path, 10, 20, 30, 42, 50)
    prune(checkpoint_path(tmp_path, 50), keep=1, spared={20, 60})
    assert list(list_checkpoints(tmp_path)) == [20, 50]


def test_going_back_to_an_older_checkpoint_and_on_is_progress(tmp_path: Path) -> None:
    _make(tmp_path, 40, 50)
    before = standing(tmp_path)
    set_aside(checkpoint_path(tmp_path, 50))
    went_back = standing(tmp_path)
    for version in (42, 50):
        _make(tmp_path, version)
        assert len({before, went_back, standing(tmp_path)}) == 3
        prune(checkpoint_path(tmp_path, version), keep=1)
    assert _names(tmp_path) == {"step-000050", "set-aside-step-000050"}


def test_a_version_that_is_written_again_is_no_progress(tmp_path: Path) -> None:
    """A job that only drains writes the checkpoint again from which it began."""
    _make(tmp_path, 40)
    before = standing(tmp_path)
    unfinished_path(checkpoint_path(tmp_path, 40)).mkdir()
    finish(checkpoint_path(tmp_path, 40))
    assert standing(tmp_path) == before
    assert _names(tmp_path) == {"step-000040"}


def test_each_checkpoint_set_aside_keeps_its_files(tmp_path: Path) -> None:
    for number in range(3):
        _make(tmp_path, 50)
        (checkpoint_path(tmp_path, 50) / str(number)).touch()
        set_aside(checkpoint_path(tmp_path, 50))
    assert {path.parent.name + "/" + path.name for path in tmp_path.glob("*/[0-9]")} == {
        "set-aside-step-000050/0",
        "set-aside-step-000050-2/1",
        "set-aside-step-000050-3/2",
    }
    assert list_checkpoints(tmp_path) == {}


def test_the_rest_of_a_killed_learner_is_removed(tmp_path: Path) -> None:
    _make(tmp_path, 40, 50)
    unfinished = unfinished_path(checkpoint_path(tmp_path, 60))
    for left in (unfinished, tmp_path / ".removed-step-000030", tmp_path / ".replaced-step-000050"):
        (left / "shards").mkdir(parents=True)
    assert unfinished_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 60)]
    recover(tmp_path)
    assert _names(tmp_path) == {"step-000040", "step-000050"}


def test_a_removal_that_failed_is_tried_again_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _make(tmp_path, 10, 20)
    remove, refusals = shutil.rmtree, ["too few descriptors"]

    def rmtree(path: Path, *, ignore_errors: bool) -> None:
        if refusals:
            refusals.pop()
        else:
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    prune(checkpoint_path(tmp_path, 20), keep=1)
    assert _names(tmp_path) == {".removed-step-000010", "step-000020"}
    assert "cannot be removed whole; the next checkpoint tries again" in caplog.text
    prune(checkpoint_path(tmp_path, 20), keep=1)
    assert _names(tmp_path) == {"step-000020"}


def test_a_replaced_checkpoint_never_gets_the_name_of_a_removed_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make(tmp_path, 5)
    unfinished_path(checkpoint_path(tmp_path, 5)).mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path, *, ignore_errors: None)  # no descriptors
    finish(checkpoint_path(tmp_path, 5))
    _make(tmp_path, 8)
    prune(checkpoint_path(tmp_path, 8), keep=1)
    monkeypatch.undo()
    recover(tmp_path)
    assert _names(tmp_path) == {"step-000008"}


def test_the_only_copy_of_a_checkpoint_is_never_removed(tmp_path: Path) -> None:
    _make(tmp_path, 20)
    (tmp_path / ".replaced-step-000010").mkdir()
    prune(checkpoint_path(tmp_path, 20), keep=1)
    assert (tmp_path / ".replaced-step-000010").exists()
    recover(tmp_path)
    assert list(list_checkpoints(tmp_path)) == [10, 20]


def test_a_refused_rename_gives_the_previous_checkpoint_its_name_back(tmp_path: Path) -> None:
    _make(tmp_path, 40)
    with pytest.raises(FileNotFoundError):
        finish(checkpoint_path(tmp_path, 40))  # nothing is there to be renamed
    assert _names(tmp_path) == {"step-000040"}


def test_the_numbers_of_the_newest_checkpoint_are_those_of_its_files(tmp_path: Path) -> None:
    assert room_for_one(tmp_path) == 0
    assert math.isnan(checkpoint_statistics(tmp_path, every_n_steps=5).newest_timestamp_s)
    _make(tmp_path, 5, 10)
    (checkpoint_path(tmp_path, 10) / "shards" / "a").write_bytes(bytes(1000))
    (checkpoint_path(tmp_path, 10) / "b").write_bytes(bytes(24))
    (tmp_path / ".unfinished-step-000015").mkdir()
    found = checkpoint_statistics(tmp_path, every_n_steps=5)
    assert (found.newest_version, found.newest_bytes, found.every_n_steps) == (10, 1024, 5)
    assert found.newest_timestamp_s == checkpoint_path(tmp_path, 10).stat().st_mtime
    assert room_for_one(tmp_path) == 1024


def test_a_disk_without_an_answer_has_no_known_checkpoint(tmp_path: Path) -> None:
    """The launcher asks at every look, and must not end the run: a stale handle of a network disk is no ENOENT."""
    _make(tmp_path, 5)
    (tmp_path / "step-000010").symlink_to("n" * 300)  # which no `stat` can follow
    assert room_for_one(tmp_path) == 0
