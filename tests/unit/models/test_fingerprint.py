"""Fingerprints of a version: they cover the model, differ for other weights, and equal SGLang's digests."""

from pathlib import Path

import pytest
import torch
from support.model_versions import model_of
from torch import Tensor

from areal_rloo.models.fingerprint import Sample, digest_of, place_of, sampled_names, take_sample


def _weights(folder: Path) -> dict[str, Tensor]:
    return dict(model_of(folder).named_parameters())


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
