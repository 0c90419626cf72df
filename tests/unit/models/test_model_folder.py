"""Damaged files of a model: an error names the file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import family_model, save_family

from areal_rloo.engines.server.model_folder import read_model
from areal_rloo.errors import DecodeError, ModelError
from areal_rloo.models import loading
from areal_rloo.models.folder import cached_folder, check_policy_weights, check_weights, num_parameters, weight_files
from areal_rloo.models.loading import load_policy
from areal_rloo.models.stored import stored_parameters
from areal_rloo.models.trainable import check_trainable


@pytest.mark.parametrize("index", [b'{"weight_map": {"a": 5}}', b'{"weight_map": []}', b"[" * 9000, b"\xff", b"{}"])
def test_a_damaged_index_is_refused(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "index.json").write_bytes(index)
    with pytest.raises(DecodeError):
        weight_files(tmp_path / "index.json")


@pytest.mark.parametrize(
    "config",
    [
        *(b"[]", b'{"vocab_size": null}', b"[" * 9000, b"\xff", b'{"text_config": 5}', b'{"vocab_size": Infinity}'),
        *(b'{"vocab_size": "5"}', b'{"vocab_size": 5, "max_position_embeddings": "9"}'),
    ],
)
def test_a_damaged_config_is_refused_before_a_server_starts(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ModelError, match=r"has no config\.json with a vocab_size"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "size", "mended"),
    [
        ({"model_type": "llama", "hidden_size": 42, "num_attention_heads": 6}, 7, {"hidden_size": 48}),
        ({"model_type": "qwen2", "hidden_size": 42, "num_attention_heads": 6, "head_dim": None}, 7, {"head_dim": 8}),
        ({"model_type": "qwen2", "hidden_size": 6, "num_attention_heads": 6}, 1, {"num_attention_heads": 3}),
        ({"model_type": "llama", "hidden_size": 6, "num_attention_heads": 0}, 0, {"num_attention_heads": None}),
        # without head_dim, heads of qwen3 have 128 numbers, whatever the hidden size
        ({"model_type": "qwen3", "hidden_size": 6, "num_attention_heads": 6, "head_dim": 15}, 15, {"head_dim": None}),
    ],
)
def test_heads_that_rotary_positions_cannot_turn_are_refused(
    tmp_path: Path, config: dict[str, Any], size: int, mended: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"^model\.path: .* has heads of {size} numbers; expected an even number"):
        check_trainable("model.path", tmp_path, context_tokens=64)
    (tmp_path / "config.json").write_text(json.dumps(config | mended))
    check_trainable("model.path", tmp_path, context_tokens=64)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_hunyuans_dynamic_positions_are_trained_because_alpha_is_fixed(tmp_path: Path, key: str) -> None:
    """As published; without alpha, or in another family, the angles depend on the length of the row."""
    rotary = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, key: "dynamic"}
    config: dict[str, Any] = {"model_type": "hunyuan_v1_dense", "max_position_embeddings": 64, "rope_scaling": rotary}

    def check(**changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        check_trainable("model.path", tmp_path, context_tokens=64)

    check()
    for changes in ({"model_type": "internlm3"}, {"rope_scaling": {**rotary, "alpha": None}}):
        with pytest.raises(ModelError, match=r"has rotary positions of type dynamic .*; expected default, linear"):
            check(**changes)
    with pytest.raises(ModelError, match=r"of type dynamic with other angles beyond 63 tokens; .*got up to 64"):
        check(max_position_embeddings=63)


def test_hunyuans_alpha_changes_only_the_base() -> None:
    base = {"rope_theta": 1000.0, "factor": 1.0}
    dynamic = family_model("hunyuan_v1_dense", rope_parameters={**base, "rope_type": "dynamic", "alpha": 50.0})
    stretched = {"rope_type": "default", "rope_theta": 1000.0 * 50.0 ** (16 / 14)}  # heads of 16 numbers
    default = family_model("hunyuan_v1_dense", rope_parameters=stretched)
    ids = torch.arange(3, 203)[None]
    with torch.no_grad():
        long, short = dynamic(input_ids=ids).logits, dynamic(input_ids=ids[:, :5]).logits
        assert torch.allclose(long, default(input_ids=ids).logits, atol=1e-4)
        assert torch.allclose(long[:, :5], short, atol=1e-4)


def test_a_config_with_infinity_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "time_step_limit": [0.0, Infinity]}')
    assert read_model(tmp_path).vocab_size == 5


def test_damaged_weights_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"model\.safetensors is not whole"):
        stored_parameters("model.path", tmp_path)


def _quantize(path: Path) -> None:
    """Store the products of a model in float8 with a scale for each block, as published checkpoints do."""
    stored = load_file(path / "model.safetensors")
    for name, weight in list(stored.items()):
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def test_quantized_weights_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    """The loader would take the numbers without the scales. A reward model may be quantized."""
    save_family("qwen3", tmp_path)
    _quantize(tmp_path)
    check_weights("rewards.model", tmp_path)
    words = r"is quantized \(model\.layers\.\S+ in model\.safetensors: F8_E4M3\); training needs"
    for check in (
        lambda: check_policy_weights("model.path", tmp_path),
        lambda: load_policy(str(tmp_path), device=torch.device("cpu")),
    ):
        with pytest.raises(ModelError, match=words):
            check()


def test_a_parameter_of_another_dtype_is_refused_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family("qwen3", tmp_path)
    load_policy(str(tmp_path), device=torch.device("cpu"))
    monkeypatch.setitem(loading._OPTIONS, "dtype", torch.bfloat16)  # a loader with a choice of its own
    words = r"^model\.path: .*: model\.\S+ was loaded as torch\.bfloat16, expected torch\.float32; take"
    with pytest.raises(ModelError, match=words):
        load_policy(str(tmp_path), device=torch.device("cpu"))


def test_a_damaged_name_in_the_cache_is_no_downloaded_model(tmp_path: Path) -> None:
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(b"\xff\xfe")
    assert cached_folder("a/b", {"HF_HUB_CACHE": str(tmp_path)}) is None


@pytest.mark.parametrize(
    "tensor",
    [
        {"data_offsets": [0, 0], "dtype": "F32"},
        {"data_offsets": [0, 0], "dtype": "F32", "shape": ["a"]},
        {"data_offsets": [0, 0], "dtype": "F32", "shape": [-1]},
        {"data_offsets": [0, 0], "dtype": "F32", "shape": [10**15] * 1000},
        {"data_offsets": [0, -1], "dtype": "F32", "shape": []},
        {"data_offsets": [], "dtype": "F32", "shape": []},
        5,
    ],
)
def test_a_header_without_sizes_is_refused(tmp_path: Path, tensor: object) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors is not whole"):
        check_weights("model.path", tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors is not whole"):
        num_parameters(tmp_path)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "a/" * 3000, "\ud800"])
def test_an_index_of_impossible_names_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json|download the model again"):
        check_weights("model.path", tmp_path)


def test_a_pipe_among_the_weights_is_no_weight_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no model\.safetensors in it"):
        check_weights("model.path", tmp_path)
