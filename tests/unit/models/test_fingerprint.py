"""Fingerprints of a version: they cover the model, differ for other weights, and equal SGLang's digests."""

import math
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, family_model
from support.model_versions import model_of
from torch import Tensor

from areal_rloo.engines.server.readback import difference_of
from areal_rloo.learner.adapters import named_weights
from areal_rloo.models.fingerprint import (
    Sample,
    compared_share,
    digest_of,
    known_names,
    place_of,
    sampled_names,
    take_sample,
)
from areal_rloo.models.trainable import TRAINED_FAMILIES

TRAINED = [name for name, options in FAMILIES.items() if options["model_type"] in TRAINED_FAMILIES]


def _weights(folder: Path) -> dict[str, Tensor]:
    return dict(model_of(folder).named_parameters())


def _published(name: str, *, vocab_size: int = 320) -> dict[str, Tensor]:
    """Make the weights of a family; servers pad the rows of a vocabulary to a multiple of 64."""
    with torch.no_grad():
        return {
            key: tensor.detach().clone() for key, tensor in named_weights(family_model(name, vocab_size=vocab_size))
        }


def _sample(weights: dict[str, Tensor], version: int, *, num_ranks: int = 1) -> Sample:
    sampled = {name: weights[name] for name in sampled_names(weights, version)}
    return take_sample(sampled, digest="sha256", num_ranks=num_ranks)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_consecutive_versions_cover_every_parameter(name: str, tiny_folders: dict[str, Path]) -> None:
    weights = _weights(tiny_folders[name])
    num_samples = 1 + len({place_of(name) for name in weights if place_of(name) != name})
    covered = [name for version in range(5, 5 + num_samples) for name in sampled_names(weights, version)]
    assert sorted(covered) == sorted(weights)
    for version in range(num_samples):
        names = [name for fingerprint in _sample(weights, version).fingerprints for name in fingerprint.names]
        padded = {"model.embed_tokens.weight", "lm_head.weight"}  # their rows are no multiple of 64 in these models
        assert sorted(names) == sorted(set(sampled_names(weights, version)) - padded)


def test_a_single_changed_value_changes_the_fingerprint(tiny_folders: dict[str, Path]) -> None:
    weights = _weights(tiny_folders["qwen2"])
    before = _sample(weights, 0)
    with torch.no_grad():
        weights["model.layers.0.self_attn.v_proj.weight"][-1, -1] += 1e-6
    changed = [a.names for a, b in zip(before.fingerprints, _sample(weights, 0).fingerprints, strict=True) if a != b]
    assert changed == [tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")]


def test_each_rank_has_a_digest_of_its_part(tiny_folders: dict[str, Path]) -> None:
    weights = _weights(tiny_folders["qwen3"])
    by_name = {fingerprint.names: fingerprint.parts for fingerprint in _sample(weights, 0, num_ranks=2).fingerprints}
    layer = "model.layers.0."
    gate, up = f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"
    halves = [[weights[gate].chunk(2)[rank], weights[up].chunk(2)[rank]] for rank in range(2)]
    assert by_name[gate, up] == tuple(digest_of(half, "sha256") for half in halves)
    down = f"{layer}mlp.down_proj.weight"
    assert by_name[down,] == tuple(digest_of([half], "sha256") for half in weights[down].chunk(2, dim=1))
    norm = f"{layer}input_layernorm.weight"
    assert by_name[norm,] == (digest_of([weights[norm]], "sha256"),) * 2
    assert not any("q_proj" in name for names in by_name for name in names), "ranks may share key and value heads"


@pytest.mark.parametrize("name", TRAINED)
def test_a_server_that_keeps_any_parameter_is_noticed_with_a_rank(name: str) -> None:
    published = _published(name)
    kept = {parameter: tensor.clone() for parameter, tensor in published.items()}
    versions = range(1 + len({place_of(name) for name in published if place_of(name) != name}))
    for tensor in published.values():
        tensor.add_(0.1)
    samples = [_sample(published, version) for version in versions]
    updated = _held(published)
    assert [difference_of(sample, [updated]) for sample in samples] == [None] * len(versions)
    for parameter in published:
        held = _held({**published, parameter: kept[parameter]})
        assert any(difference_of(sample, [held]) for sample in samples), parameter


def _held(weights: dict[str, Tensor]) -> dict[str, str]:
    """Digest the parameters of a server, which holds some as one, by the server's names."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        base = name.replace("gpt_neox.", "model.")
        for joined, members in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            member = next((member for member in members if f".{member}." in name), None)
            alone = sum(name.replace(str(member), other) in weights for other in members) == 1
            if member is not None and not alone:
                base = base.replace(member, joined)
        parts.setdefault(base, []).append(tensor)
    return {name: f"{digest_of(tensors, 'sha256'):016x}" for name, tensors in parts.items()}


@pytest.mark.parametrize("name", TRAINED)
def test_the_compared_share_is_that_of_all_samples(name: str) -> None:
    """Every family has samples, for one rank of all numbers; with two ranks, of those whose parts are known."""
    published = _published(name)
    sizes = {parameter: tensor.numel() for parameter, tensor in published.items()}
    versions = range(1 + len({place_of(name) for name in published if place_of(name) != name}))
    for num_ranks in (1, 2):
        samples = [_sample(published, version, num_ranks=num_ranks) for version in versions]
        compared = {each for sample in samples for fingerprint in sample.fingerprints for each in fingerprint.names}
        assert all(len(f.parts) == num_ranks for sample in samples for f in sample.fingerprints)
        share = compared_share({each: tensor.shape for each, tensor in published.items()}, num_ranks=num_ranks)
        assert share == pytest.approx(sum(sizes[each] for each in compared) / sum(sizes.values()))
        assert share == 1 if num_ranks == 1 else 0 < share < 1


@pytest.mark.parametrize("layer", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_fused_matrices_are_compared_with_a_rank_alone(layer: str) -> None:
    published = _published("phi3")
    for num_ranks in (1, 2):
        names = [fingerprint.names for fingerprint in _sample(published, 0, num_ranks=num_ranks).fingerprints]
        assert ((f"model.layers.0.{layer}.weight",) in names) == (num_ranks == 1)


def test_rows_of_a_vocabulary_that_servers_pad_are_not_compared() -> None:
    shapes = {name: tensor.shape for name, tensor in _published("phi", vocab_size=300).items()}
    vocabulary = sum(math.prod(shape) for shape in shapes.values() if 300 in shape)
    total = sum(map(math.prod, shapes.values()))
    assert compared_share(shapes, num_ranks=1) == pytest.approx(1 - vocabulary / total)


def test_the_known_names_have_a_layer_and_the_rest() -> None:
    names = list(_published("qwen3"))
    known = known_names(names)
    assert {place_of(name) for name in known if ".layers." in name} == {".layers.0."}
    assert {name for name in known if ".layers." not in name} == {name for name in names if ".layers." not in name}
    assert known_names(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1, 4437072937787649834),
        (6, 5240187048714597915),
        (4096, 6331843952851583485),
        (32780, 1684919540233518380),
        (98306, 4592319708966282154),
    ],
)
def test_tiles_are_the_digest_of_sglangs_kernel(num_bytes: int, expected: int) -> None:
    """The numbers are those of SGLang 0.5.23's Triton kernel (`gpu_tensor_hash`) in Triton's interpreter."""
    data = (torch.arange(num_bytes) * 7919 % 251).to(torch.uint8)
    assert digest_of([data], "tiles") == expected
    assert digest_of(list(data.split(4 * 5000)), "tiles") == expected
