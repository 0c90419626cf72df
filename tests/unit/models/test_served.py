"""Launchers refuse before a start all that engine or learner refuse by config.json or by the headers of weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, save_family
from support.situations import found, only
from transformers import AutoConfig

from areal_rloo.engines.embedded.families import Architecture
from areal_rloo.errors import ModelError
from areal_rloo.launcher.doctor.inputs import check_models
from areal_rloo.models.equality import check_equality
from areal_rloo.models.folder import check_layers, stored_tensors
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.models.trainable import SERVED_FAMILIES, TRAINED_FAMILIES

_LONG = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
_LONG |= {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 1024}
_WRONG = [
    ("phi3", {"rope_parameters": _LONG}, "rotary positions of type longrope"),
    ("llama", {"hidden_act": "gelu"}, "activation gelu; expected silu or gelu_pytorch_tanh"),
    ("gemma2", {"hidden_activation": "relu"}, "activation relu"),
    ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layers of type linear_attention"),
]


def _saved(family: str, folder: Path, options: dict[str, Any]) -> str:
    save_family(family, folder)
    make_tiny_tokenizer().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return f"model.path={folder}"


@pytest.mark.parametrize(("family", "options", "words"), _WRONG)
def test_an_option_that_the_embedded_engine_lacks_is_refused_first(
    family: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The engine refuses the same, and a server is not asked."""
    named = _saved(family, tmp_path, options)
    short = ("data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=64")
    assert words in only(check_models, "wrong", named, "rollout.engine=embedded", *short).what
    with pytest.raises(ModelError, match=words):
        Architecture.of_config(AutoConfig.from_pretrained(tmp_path), tmp_path)
    assert [finding.state for finding in found(check_models, named, "rollout.engine=vllm", *short)] == ["ok"]


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "expected causal attention"),
        ("llama", {"final_logit_softcapping": 3.0}, "which transformers ignores in a llama model"),
    ],
)
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_an_option_that_the_learner_lacks_is_refused_with_each_engine(
    family: str, options: dict[str, Any], words: str, engine: str, tmp_path: Path
) -> None:
    named = _saved(family, tmp_path, options)
    finding = only(check_models, "wrong", named, f"rollout.engine={engine}")
    assert words in finding.what
    assert "rollout.engine" not in finding.fix
    with pytest.raises(ModelError, match=words):
        check_equality(str(tmp_path), context_tokens=64)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name]["model_type"] in TRAINED_FAMILIES])
def test_every_family_passes_the_checks_before_a_start(name: str, tmp_path: Path) -> None:
    named = _saved(name, tmp_path, {})
    engine = "embedded" if FAMILIES[name]["model_type"] in SERVED_FAMILIES else "vllm"
    states = [finding.state for finding in found(check_models, named, f"rollout.engine={engine}")]
    assert states == ["ok"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text", "llama"])
@pytest.mark.parametrize(
    ("option", "name"), [("num_key_value_heads", "k_proj"), ("intermediate_size", "mlp"), ("hidden_size", "proj")]
)
def test_other_shapes_than_those_of_the_config_are_refused_before_a_start(
    family: str, option: str, name: str, tmp_path: Path
) -> None:
    named = _saved(family, tmp_path, {})
    path = tmp_path / "config.json"
    changed = json.loads(path.read_text())
    changed[option] *= 2
    path.write_text(json.dumps(changed))
    finding = only(check_models, "wrong", named)
    assert f"{option}={changed[option]}" in finding.what
    assert name in finding.what
    assert "of shape [" in finding.what
    assert "download the model again" in finding.fix


@pytest.mark.parametrize("lost", [".layers.2.", ".layers.3.mlp.down_proj.weight", ".layers.0.self_attn.q_proj.bias"])
def test_a_layer_without_weights_is_refused_before_a_start(lost: str, tmp_path: Path) -> None:
    named = _saved("qwen2", tmp_path, {})
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if lost not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    finding = only(check_models, "wrong", named)
    assert f"has no weights for model{lost.rstrip('.')}" in finding.what
    with pytest.raises(ModelError, match="expected num_hidden_layers=4 equal layers"):
        check_layers("model.path", tmp_path, stored_tensors("model.path", tmp_path))
