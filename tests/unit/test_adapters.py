"""Low-rank adapters: what they add, what is frozen, and the weights that engines and exports get."""

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
def test_new_adapters_add_nothing_and_the_weights_have_the_names_they_had(
    tiny_folders: dict[str, Path], name: str
) -> None:
    original = dict(AutoModelForCausalLM.from_pretrained(tiny_folders[name], dtype=torch.float32).named_parameters())
    weights = _team(tiny_folders[name]).whole_weights()
    assert list(weights) == list(original)
    assert all(torch.equal(weights[key], original[key].detach()) for key in original)


def test_adapters_alone_are_trained(tiny_folders: dict[str, Path]) -> None:
    rank = _team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, v_proj]").own
    trained = [name for name, parameter in rank.policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * rank.policy.causal.config.num_hidden_layers
    assert all("lora_" in name for name in trained)
    assert sum(len(group["params"]) for group in rank.optimizer.param_groups) == len(trained)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_merged_weights_are_the_model_with_its_adapters(tiny_folders: dict[str, Path], name: str) -> None:
    """Names, values and what it says of a text, biases among them."""
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


def test_layers_that_are_not_there_are_named_with_those_that_are(tiny_folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="got lm_head"):  # its weight is read as it is
        _team(tiny_folders["qwen2"], "learner.lora.targets=[q_proj, lm_head]")
    with pytest.raises(ModelError, match=r"learner.lora.targets: expected names .*q_proj.*, got query_key_value"):
        _team(tiny_folders["qwen2"], "learner.lora.targets=[query_key_value]")
