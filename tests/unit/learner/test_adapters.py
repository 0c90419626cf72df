"""Test low-rank adapters: trained and frozen weights, and the merged weights for engines and exports."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_rloo.config import load_config
from areal_rloo.errors import ModelError
from areal_rloo.learner.adapters import named_weights
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.team import Team

pytest.importorskip("peft", reason="the extra peft is not installed")

CPU = torch.device("cpu")


def _team(folder: Path, *overrides: str) -> Team:
    torch.manual_seed(0)
    config = load_config("quickstart.yaml", ["learner.lora={rank: 4, alpha: 8}", *overrides])
    return Team(build_rank(config, model_path=str(folder), device=CPU))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_new_adapters_change_no_weight_and_no_name(tiny_folders: dict[str, Path], name: str) -> None:
    original = dict(AutoModelForCausalLM.from_pretrained(tiny_folders[name], dtype=torch.float32).named_parameters())
    weights = _team(tiny_folders[name]).whole_weights()
    assert list(weights) == list(original)
    assert all(torch.equal(weights[key], original[key].detach()) for key in original)


def test_only_adapters_are_trained(tiny_folders: dict[str, Path]) -> None:
    rank = _team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, v_proj]").own
    trained = [name for name, parameter in rank.policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * rank.policy.causal.config.num_hidden_layers
    assert all("lora_" in name for name in trained)
    assert sum(len(group["params"]) for group in rank.optimizer.param_groups) == len(trained)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_merged_weights_equal_the_model_with_adapters(tiny_folders: dict[str, Path], name: str) -> None:
    """Compare names, values (biases included) and the logits of a text."""
    causal = _team(tiny_folders[name]).own.policy.causal
    with torch.no_grad():
        for key, parameter in causal.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.1)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folders[name], dtype=torch.float32)
    before = plain.state_dict()
    missing, unexpected = plain.load_state_dict(dict(named_weights(causal)), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    assert not torch.equal(plain.state_dict()["model.layers.0.mlp.up_proj.weight"], before["lm_head.weight"])
    causal.set_attn_implementation("sdpa")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(plain(ids).logits, causal(ids).logits, rtol=1e-4, atol=1e-4)


def test_unknown_target_layers_are_refused_with_the_known_names(tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="got lm_head"):  # the head weight is used directly
        _team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, lm_head]")
    with pytest.raises(ModelError, match=r"learner.lora.targets: expected names .*q_proj.*, got query_key_value"):
        _team(tiny_folders["qwen2"], "learner.lora.targets=[query_key_value]")
