"""The tiny model in the cache."""

import os
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.learner.warm_start import prepare_tiny_model


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
