"""The tiny model in the cache."""

import os
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import PreflightError
from areal_rloo.learner.warm_start import prepare_tiny_model, tiny_model_folder


def test_a_model_that_cannot_be_moved_into_the_cache_is_an_error(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", ["model.tiny.warm_start=null"])
    before = os.umask(0o027)
    try:
        made = prepare_tiny_model(config, tmp_path / "models")
    finally:
        os.umask(before)
    assert not made.cached
    modes = {path.stat().st_mode & 0o777 for path in Path(made.path).iterdir()}
    assert modes == {0o640}, "all files have the mode of the umask"
    assert prepare_tiny_model(config, tmp_path / "models").cached

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / Path(made.path).name).write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        prepare_tiny_model(config, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == [Path(made.path).name], "nothing unfinished is left"


def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AREAL_RLOO_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(PreflightError, match=r"^model\.path=tiny: no home folder .*; set HOME or AREAL_RLOO_CACHE$"):
        tiny_model_folder(load_config("quickstart.yaml"))
