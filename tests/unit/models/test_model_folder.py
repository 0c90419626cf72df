"""Damaged files of a model: an error names the file."""

from pathlib import Path

import pytest

from areal_rloo.engines.sglang.model_folder import read_model
from areal_rloo.errors import DecodeError, ModelError
from areal_rloo.models.folder import cached_folder, weight_files


@pytest.mark.parametrize("index", [b'{"weight_map": {"a": 5}}', b'{"weight_map": []}', b"[" * 9000, b"\xff", b"{}"])
def test_a_damaged_index_is_refused(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "index.json").write_bytes(index)
    with pytest.raises(DecodeError):
        weight_files(tmp_path / "index.json")


@pytest.mark.parametrize("config", [b"[]", b'{"vocab_size": null}', b"[" * 9000, b"\xff", b'{"text_config": 5}'])
def test_a_damaged_config_is_refused_before_a_server_starts(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ModelError, match=r"has no config\.json with a vocab_size"):
        read_model(tmp_path)


def test_a_config_with_infinity_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "time_step_limit": [0.0, Infinity]}')
    assert read_model(tmp_path).vocab_size == 5


def test_damaged_weights_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"a\.safetensors is not whole"):
        read_model(tmp_path)


def test_a_damaged_name_in_the_cache_is_no_downloaded_model(tmp_path: Path) -> None:
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(b"\xff\xfe")
    assert cached_folder("a/b", {"HF_HUB_CACHE": str(tmp_path)}) is None
