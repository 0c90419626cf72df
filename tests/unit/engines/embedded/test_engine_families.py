"""Checkpoints written by transformers: served with the learner's logprobs, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.requests_to_serve import assert_agree, learner_logprobs, mixed_requests, results, serving
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_rloo.engines.embedded.families import FAMILIES
from areal_rloo.errors import ModelError
from areal_rloo.models.equality import check_equality
from areal_rloo.models.loading import load_policy
from areal_rloo.models.served import check_served
from areal_rloo.models.trainable import SERVED_FAMILIES, check_trainable

CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"original_max_position_embeddings": 32, "rope_theta": 1000.0}
SERVED = {
    "qwen2 tied": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 one kv head": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2 no grouping": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2 window that no layer uses": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 12}),
    "qwen3 untied": ("qwen3", {"head_dim": 12, "tie_word_embeddings": False}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3 biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "llama tied": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama biases in the mlp": ("llama", {"mlp_bias": True}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama llama3 rope": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1000.0, **LLAMA3}},
    ),
    "qwen2 yarn rope": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **YARN}}),
}


def make_model(family: str, options: dict[str, object]) -> PreTrainedModel:
    """Make a model with random weights, biases and norms, large enough for distributions far from uniform."""
    config_class, model_class = CLASSES[family]
    torch.manual_seed(3)
    model: PreTrainedModel = model_class(config_class(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4)
    return model


def assert_served_like_the_learner(folder: Path, num: int = 9) -> None:
    requests = mixed_requests(num, vocab_size=SIZES["vocab_size"], temperature=0.9)
    with serving(folder) as engine:
        completions = results(engine.submit(requests))
    assert_agree(completions, learner_logprobs(folder, requests, completions), 1e-5)


@pytest.mark.parametrize("case", SERVED)
def test_a_checkpoint_has_the_learners_logprobs(case: str, tmp_path: Path) -> None:
    family, options = SERVED[case]
    make_model(family, options).save_pretrained(tmp_path)
    assert_served_like_the_learner(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_sharded_checkpoint_is_read(family: str, tmp_path: Path) -> None:
    make_model(family, {}).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_served_like_the_learner(tmp_path)


def test_a_tied_checkpoint_with_a_stored_head_is_read(tmp_path: Path) -> None:
    make_model("qwen2", {}).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_served_like_the_learner(tmp_path)


def test_a_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    make_model("llama", {}).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert_served_like_the_learner(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_without_types_of_layers_are_trained_and_served(family: str, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    make_model(family, window).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]  # as older versions of transformers write it
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_equality(str(tmp_path), context_tokens=64)
    assert_served_like_the_learner(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_window_layers": 2}))
    assert_served_like_the_learner(tmp_path)


def _assert_not_trained(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_trainable("model.path", folder, context_tokens=65)
    with pytest.raises(ModelError, match=words):
        check_equality(str(folder), context_tokens=65)


def _assert_refused(folder: Path, words: str) -> None:
    _assert_not_trained(folder, words)
    with pytest.raises(ModelError, match=words), serving(folder):
        pass


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_length_dependent_rope_beside_a_flat_option_is_refused(family: str, tmp_path: Path) -> None:
    """transformers reads the options of each type of layer although an option stands beside them."""
    save_family(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    dynamic = {**plain, "rope_type": "dynamic", "factor": 4.0}
    mixed = {"full_attention": dynamic, "sliding_attention": plain, "rope_theta": 1000.0}
    for options in ({"rope_parameters": mixed}, {"rope_parameters": plain, "rope_scaling": mixed}):
        (tmp_path / "config.json").write_text(json.dumps(config | options))
        _assert_not_trained(tmp_path, "rotary positions of type dynamic ")


def test_the_shorter_of_two_original_lengths_counts(tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "longrope", "original_max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": 64}))
    _assert_not_trained(tmp_path, "other angles beyond 64 tokens")


@pytest.mark.parametrize("window", [0, -1, "8"])
def test_a_window_without_tokens_is_refused(window: object, tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    _assert_not_trained(tmp_path, "has sliding_window .*at least 1, or null")


def test_longrope_is_trained_within_the_original_length(tmp_path: Path) -> None:
    """There, all sequences of a row have the same angles."""
    options = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": [1.5] * 6, "long_factor": [9.0] * 6}
    make_model("llama", {"rope_parameters": {**options, "original_max_position_embeddings": 64}}).save_pretrained(
        tmp_path
    )
    check_equality(str(tmp_path), context_tokens=64)
    with pytest.raises(
        ModelError, match="other angles beyond 64 tokens; expected sequences of at most as many, got up to 65"
    ):
        check_equality(str(tmp_path), context_tokens=65)


def test_longrope_as_phi3_spells_it_is_trained(tmp_path: Path) -> None:
    """Phi-3-128k has the original length beside the section, and a config of phi3 has it always."""
    save_family("phi3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"] // 2
    config = {key: value for key, value in config.items() if key not in ("rope_parameters", "sliding_window")}
    longrope = {"type": "longrope", "short_factor": [1.5] * width, "long_factor": [9.0] * width}
    config |= {"rope_scaling": longrope, "original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_equality(str(tmp_path), context_tokens=4096)
    with pytest.raises(ModelError, match="other angles beyond 4096 tokens"):
        check_equality(str(tmp_path), context_tokens=4097)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (4, 8)])
def test_heads_that_do_not_share_keys_evenly_are_refused(heads: int, kv_heads: int, tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _assert_not_trained(tmp_path, f"num_attention_heads={heads} and num_key_value_heads={kv_heads} .*to divide the")


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "torchao"])
def test_a_quantized_model_is_refused_by_engine_learner_and_dry_run(method: str, tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, given in (
        ("quantization_config", {"quantization_config": {"quant_method": method, "bits": 4}}),
        ("compression_config", {"compression_config": {"quant_method": method}}),
        ("quantization_config", {"text_config": {"quantization_config": {"quant_method": method}}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | given))
        words = rf"is quantized \({key} in config\.json: {method}\); training needs full-precision .*; take the unquant"
        _assert_refused(tmp_path, words)
        with pytest.raises(ModelError, match=words):
            load_policy(str(tmp_path), device=torch.device("cpu"))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_dependent_rope_is_refused_by_engine_learner_and_dry_run(rope_type: str, tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    factors = [1.0] * (SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2)
    config["rope_parameters"] |= {
        "rope_type": rope_type,
        "factor": 2.0,
        "short_factor": factors,
        "long_factor": factors,
    }
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    _assert_refused(tmp_path, f"rotary positions of type {rope_type} ")
    scaling = config.pop("rope_parameters") | {"type": rope_type}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))  # as older versions write it
    _assert_refused(tmp_path, f"rotary positions of type {rope_type} ")


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_rope_parameters_by_type_of_layer_are_refused_for_qwen3(rope_type: str, tmp_path: Path) -> None:
    make_model("qwen3", {"head_dim": 12}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"full_attention": {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1000.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"rotary positions of type dynamic|cannot load"):
        check_equality(str(tmp_path), context_tokens=65)


def test_rope_scaling_decides_if_rope_parameters_differ(tmp_path: Path) -> None:
    make_model("qwen3", {"head_dim": 12}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _assert_refused(tmp_path, "rotary positions of type dynamic ")


def test_a_mixture_of_experts_is_refused_with_the_choices(tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mixtral", "num_local_experts": 8}))
    _assert_not_trained(
        tmp_path, r"is a mixtral model with num_local_experts=8 .*take a model of .*qwen2, qwen3, llama,"
    )


def test_a_family_that_is_not_served_is_refused_before_loading(tmp_path: Path) -> None:
    assert tuple(FAMILIES) == SERVED_FAMILIES
    save_family("cohere2", tmp_path)
    with pytest.raises(ModelError, match=r"is a cohere2 model, which the embedded engine does not serve; .*glm4"):
        check_served("model.path", tmp_path, "embedded")
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is a cohere2 model, which .*rollout\.engine"), serving(tmp_path):
        pass


def test_sglang_must_find_the_rotated_part_of_heads(tmp_path: Path) -> None:
    """SGLang 0.5.23 reads the top level alone, and rotates whole heads otherwise: up to 4.4 nats from transformers."""
    save_family("phi3", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5
    for engine in ("vllm", "embedded"):
        check_served("model.path", tmp_path, engine)
    with pytest.raises(ModelError, match=r"SGLang does not look: .*add \"partial_rotary_factor\": 0\.5 to the top"):
        check_served("model.path", tmp_path, "sglang")
    file.write_text(json.dumps(config | {"partial_rotary_factor": 0.5}))
    check_served("model.path", tmp_path, "sglang")
    save_family("llama", tmp_path / "llama")
    check_served("model.path", tmp_path / "llama", "sglang")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors in it"), serving(tmp_path):
        pass


def test_the_error_names_a_missing_weight(tmp_path: Path) -> None:
    make_model("llama", {}).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"cannot load .*missing \['model\.norm\.weight'\]"), serving(tmp_path):
        pass
