"""The sizes of a model by config.json and by the headers of the files, against transformers."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, save_family
from transformers import AutoModelForCausalLM

from areal_rloo.config import Config, load_config
from areal_rloo.launcher.fit import model_sizes
from areal_rloo.models.sizes import Sizes
from areal_rloo.models.trainable import TRAINED_FAMILIES


def _config(*overrides: str) -> Config:
    return load_config("gsm8k_rloo.yaml", overrides)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_the_sizes_count_the_parameters_of_a_model(tiny_folders: dict[str, Path], name: str) -> None:
    sizes = model_sizes(_config(f"model.path={tiny_folders[name]}"), {})
    assert sizes is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_folders[name])
    assert sizes.num_parameters == model.num_parameters()
    matrices = [p.numel() for p in model.parameters() if p.ndim == 2]
    assert dataclasses.replace(sizes, counted=None).num_parameters == sum(matrices)
    weights = {name.rsplit(".", 2)[1]: tuple(p.shape) for name, p in model.named_parameters() if "proj.weight" in name}
    assert sizes.matrices == weights


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name]["model_type"] not in TRAINED_FAMILIES])
def test_the_parameters_of_an_unlisted_family_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    model = save_family(name, tmp_path)
    sizes = model_sizes(_config(f"model.path={tmp_path}"), {})
    near = pytest.approx(model.num_parameters(), rel=1e-3)  # files have buffers
    assert sizes is None or sizes.num_parameters == near
    assert (sizes is None) == (Sizes.of(model.config.to_dict()) is None)


def test_a_tied_head_in_the_files_is_counted_once(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_folders["qwen2"], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    weights, before = load_file(path), model_sizes(_config(f"model.path={tmp_path}"), {})
    assert before is not None and before.tied
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    after = model_sizes(_config(f"model.path={tmp_path}"), {})
    assert after is not None
    assert after.num_parameters == before.num_parameters


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name]["model_type"] in TRAINED_FAMILIES])
def test_the_sizes_count_the_parameters_of_a_family(name: str, tmp_path: Path) -> None:
    """Read config.json as transformers writes it, and as older versions write it, without the default of ties."""
    model = save_family(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    targets = {name.rsplit(".", 2)[1] for name in matrices if name.endswith("proj.weight")}
    sides = sum(sum(p.shape) for name, p in matrices.items() if name.endswith("proj.weight"))
    del config["tie_word_embeddings"]
    for read in (config | {"tie_word_embeddings": model.config.tie_word_embeddings}, config):
        sizes = Sizes.of(read)
        assert sizes is not None
        assert sizes.num_parameters == sum(p.numel() for p in matrices.values())
        if sizes.gated:  # the others have names of their own
            assert sizes.num_adapted(3, tuple(targets)) == 3 * sides
            assert sizes.num_adapted(3, None) >= 3 * sides  # more where the family fuses layers
    assert Sizes.of(config | {"tie_word_embeddings": not model.config.tie_word_embeddings}).tied != sizes.tied


def test_the_tiny_model_has_the_sizes_of_its_recipe() -> None:
    sizes = model_sizes(load_config("quickstart.yaml"), {})
    assert sizes is not None
    assert (sizes.hidden_size, sizes.num_layers, sizes.vocab_size) == (96, 3, 258)
