"""Each evaluation has a folder of its own, also among several of the same second."""

from pathlib import Path

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.stages.evaluate import _own_folder


def test_evaluations_of_the_same_second_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(_own_folder(None, "name-1")) for _ in range(3)] == [
        "evaluations/name-1",
        "evaluations/name-1-2",
        "evaluations/name-1-3",
    ]


def test_a_folder_that_another_evaluation_has_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        assert _own_folder(tmp_path / name, "") == tmp_path / name
    for name in ("new", "empty", "file"):
        with pytest.raises(PreflightError, match="'--output': expected an empty or a new folder, got"):
            _own_folder(tmp_path / name, "")
    with pytest.raises(PreflightError, match="cannot be written: Not a directory"):
        _own_folder(tmp_path / "file" / "below", "")
