"""Tensors of a folder become parameters as transformers loads them; copies beside them and old buffers are left out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, save_family
from support.train_steps import step_config
from torch import Tensor

from areal_rloo.engines.embedded.parameters import load_checkpoint
from areal_rloo.engines.server.readback import sample_of_files
from areal_rloo.errors import ModelError
from areal_rloo.learner.adapters import named_weights
from areal_rloo.learner.building import build_rank
from areal_rloo.models.folder import check_weights, num_parameters, stored_tensors
from areal_rloo.models.loading import load_policy
from areal_rloo.models.stored import difference_of_shapes, digest_of_files, read_parameters, stored_parameters
from areal_rloo.models.trainable import TRAINED_FAMILIES

CPU = torch.device("cpu")
TRAINED = [name for name, options in FAMILIES.items() if options["model_type"] in TRAINED_FAMILIES]


def _published(folder: Path) -> dict[str, Tensor]:
    """Load the model, the slow way to the names and values that the learner publishes."""
    return dict(named_weights(load_policy(str(folder), device=CPU)))


def _add(folder: Path, tensors: dict[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def _assert_as_loaded(folder: Path) -> None:
    read = dict(read_parameters(stored_parameters("model.path", folder)))
    published = _published(folder)
    assert read.keys() == published.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in published.items())


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_of_the_files_are_those_of_the_learner(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    _assert_as_loaded(tmp_path)


def test_a_renamed_head_has_the_name_of_the_model(tmp_path: Path) -> None:
    save_family("gpt_neox", tmp_path)
    assert "embed_out.weight" in stored_tensors("model.path", tmp_path)
    assert stored_parameters("model.path", tmp_path)["lm_head.weight"].name == "embed_out.weight"
    build_rank(step_config(), model_path=str(tmp_path), device=CPU)


def test_a_second_copy_beside_the_index_is_no_part_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    save_family("mistral", tmp_path / "whole").save_pretrained(folder, max_shard_size="200KB")
    num, names = num_parameters(folder), set(stored_tensors("model.path", folder))
    save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, folder / "consolidated.safetensors")
    save_file({"base.lora_A.weight": torch.zeros(64, 4)}, folder / "adapter_model.safetensors")
    assert num_parameters(folder) == num
    assert set(stored_tensors("model.path", folder)) == names
    assert len({tensor.file for tensor in stored_tensors("model.path", folder).values()}) > 1
    _assert_as_loaded(folder)
    named = stored_parameters("model.path", folder)
    sample = sample_of_files(named, dtype="bfloat16", digest="sha256", num_ranks=1)
    assert set(named) == set(_published(folder))
    assert {name for fingerprint in sample.fingerprints for name in fingerprint.names} <= set(named)


def test_weights_of_an_index_and_a_whole_model_beside_are_refused(tmp_path: Path) -> None:
    model = save_family("llama", tmp_path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    for file in (tmp_path / "shards").iterdir():
        file.rename(tmp_path / file.name)
    with pytest.raises(ModelError, match=r"^model\.path: .* which transformers would load, .* remove the other$"):
        check_weights("model.path", tmp_path)


BUFFERS = {
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
    },
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
}


@pytest.mark.parametrize("name", list(BUFFERS))
def test_buffers_of_old_checkpoints_are_no_parameters(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    _add(tmp_path, BUFFERS[name])
    _assert_as_loaded(tmp_path)
    build_rank(step_config(), model_path=str(tmp_path), device=CPU)


def test_the_embedded_engine_ignores_buffers_of_old_checkpoints(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    expected, _ = load_checkpoint(tmp_path, context_tokens=64, device=CPU, dtype=torch.float32)
    _add(tmp_path, BUFFERS["llama"])
    found, _ = load_checkpoint(tmp_path, context_tokens=64, device=CPU, dtype=torch.float32)
    assert torch.equal(found.embedding, expected.embedding)


def test_a_tensor_of_no_parameter_is_refused_when_the_learner_starts(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    _add(tmp_path, {"v_head.summary.weight": torch.zeros(1, 64)})
    with pytest.raises(ModelError, match=r"^model\.path: .* has weights v_head\.summary\.weight .* or remove them$"):
        build_rank(step_config(), model_path=str(tmp_path), device=CPU)


def test_a_missing_tensor_and_another_shape_are_refused(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"^model\.path: .* has no weights for model\.norm\.weight; download"):
        stored_parameters("model.path", tmp_path)
    save_file({**whole, "model.norm.weight": torch.zeros(3)}, file)
    with pytest.raises(ModelError, match=r"has model\.norm\.weight of shape \[3\], expected \[64\] by config\.json"):
        stored_parameters("model.path", tmp_path)


def test_the_digest_is_of_the_weights_and_not_of_their_files(tmp_path: Path) -> None:
    model = save_family("mistral", tmp_path / "whole")
    expected = digest_of_files(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert digest_of_files(tmp_path / "shards") == expected
    others = {expected}
    for number, parameter in enumerate(model.parameters()):
        before = parameter.detach().clone()
        parameter.data[number % len(parameter)] += 1e-3  # any row
        model.save_pretrained(tmp_path / "other")
        others.add(digest_of_files(tmp_path / "other"))
        parameter.data.copy_(before)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "other")
    others.add(digest_of_files(tmp_path / "other"))
    config = tmp_path / "whole" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-0', '"rms_norm_eps": 2e-0'))
    others.add(digest_of_files(tmp_path / "whole"))
    assert len(others) == 3 + len(list(model.parameters()))


def test_a_file_that_changes_during_a_run_is_read_no_more(tmp_path: Path) -> None:
    model = save_family("llama", tmp_path)
    stored = stored_parameters("model.path", tmp_path)
    assert dict(read_parameters(stored)).keys() == stored.keys()
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors has changed since this process read it first"):
        next(read_parameters(stored))


def test_the_first_difference_of_shapes_names_the_parameter() -> None:
    expected = {"a": (2, 3), "b": (4,), "c": (5,)}
    assert difference_of_shapes(expected, expected) is None
    assert difference_of_shapes(expected, {**expected, "d": (1,)}) == "parameter d: the model has none of that name"
    assert difference_of_shapes(expected, {"a": (2, 3)}) == "parameter b is missing, and 1 others"
    assert difference_of_shapes(expected, {**expected, "b": (5,)}) == "parameter b: expected shape (4,), got (5,)"
