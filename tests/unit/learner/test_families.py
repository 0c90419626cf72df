"""Train a small model of each family, and compare with transformers: gradients, ranks, adapters, export and reload."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILIES, family_model, save_family
from support.one_rank import CPU
from support.ranks_to_run import Job, on_one, on_ranks
from support.train_steps import (
    VERSION,
    assert_same_gradient,
    ragged_groups,
    reference_gradient,
    spied_step,
    step_config,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_rloo.config import Config
from areal_rloo.errors import ModelError
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import write_model
from areal_rloo.learner.costs import train_flops
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.attention import packed_attention
from areal_rloo.models.equality import check_equality, compare, small_model
from areal_rloo.models.folder import linear_layers
from areal_rloo.models.loading import PACKED_ATTENTION, decoder_layers
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.models.trainable import SERVED_FAMILIES, TRAINED_FAMILIES, check_trainable

TRAINED = [name for name, options in FAMILIES.items() if options["model_type"] in TRAINED_FAMILIES]


UNLISTED = ["diffllama", "jais2", "minicpm3", "ministral3", "persimmon"]  # only the check of a small copy decides


@pytest.mark.parametrize("name", [*TRAINED, *UNLISTED])
def test_a_family_has_the_gradient_of_transformers(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    check_trainable("model.path", tmp_path, context_tokens=64)
    config, groups = step_config("learner.microbatch_tokens=128"), ragged_groups()
    (gradient,), result = spied_step(tmp_path, groups, config)
    assert result.updates.num_optimizer_steps == 1
    assert_same_gradient(gradient, reference_gradient(tmp_path, groups, config))


_UNLIKE = ("gemma2", "gemma3_text", "glm4", "gpt_neox", "mistral", "olmo2", "phi", "phi3")  # each other and the rest
SOME = [name if name in _UNLIKE else pytest.param(name, marks=pytest.mark.full) for name in TRAINED]
SOME += [pytest.param(name, marks=pytest.mark.full) for name in UNLISTED]


def test_every_trained_family_is_compared_and_in_the_document() -> None:
    assert {FAMILIES[name]["model_type"] for name in TRAINED} == set(TRAINED_FAMILIES)
    document = (Path(__file__).resolve().parents[3] / "docs" / "learner.md").read_text()
    table = document.partition("## Models")[2].partition("`tests/unit")[0]
    assert tuple(re.findall(r"`(\w+)`", table)[1:]) == (*SERVED_FAMILIES, *TRAINED_FAMILIES[len(SERVED_FAMILIES) :])


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_neox", "phi3", "qwen2"])
def test_a_small_model_is_made_of_the_default_config_of_a_family(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    difference, seen = compare(small_model(config))
    assert difference < 1e-4
    assert seen > 1e-2
    assert train_flops(config, [5, 9], [3, 4]) > 0


@pytest.mark.parametrize("rotated", [[1, 0], [1, 1, 0], [1, 1, 1, 1]])
def test_a_small_model_of_few_layers_has_both_kinds(rotated: list[int], tmp_path: Path) -> None:
    save_family("smollm3", tmp_path, num_hidden_layers=len(rotated), no_rope_layers=rotated)
    check_equality(str(tmp_path), context_tokens=64)
    small = small_model(AutoConfig.from_pretrained(tmp_path)).config
    assert len(small.no_rope_layers) == small.num_hidden_layers
    assert set(small.no_rope_layers) == set(rotated)


def test_a_family_whose_attention_takes_no_layout_is_refused(tmp_path: Path) -> None:
    save_family("stablelm", tmp_path)
    check_trainable("model.path", tmp_path, context_tokens=64)
    words = (
        r"is a stablelm model, and the check .* fails: .* \(TypeError: .*'packed'\); take a model of one of .* qwen2, "
    )
    with pytest.raises(ModelError, match=words):
        build_rank(step_config(), model_path=str(tmp_path), device=CPU)


@pytest.mark.parametrize("name", UNLISTED)
def test_an_unlisted_family_that_equals_transformers_is_trained(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_family(name, tmp_path)
    before = torch.random.get_rng_state()
    check_equality(str(tmp_path), context_tokens=64)
    assert torch.equal(torch.random.get_rng_state(), before), "the check draws no random numbers of a run"
    assert f"{tmp_path} is a {name} model, which no test compares with transformers" in caplog.text


def test_an_unlisted_family_whose_rows_are_not_equal_is_refused(tmp_path: Path) -> None:
    """Each sixteenth layer of this lfm2 is a convolution over the row, which mixes the sequences."""
    layers = ["full_attention"] * 15 + ["conv"]
    save_family("lfm2", tmp_path, num_hidden_layers=16, layer_types=layers)
    with pytest.raises(ModelError, match=r"logprobs of a packed row differ by .* nats from those of transformers"):
        build_rank(step_config(), model_path=str(tmp_path), device=CPU)


def test_a_class_that_takes_an_attention_only_when_built_is_refused(tmp_path: Path) -> None:
    """Built with the learner's attention, this class masks nothing; given its name later, it would go on as before."""
    save_family("gpt_neox_japanese", tmp_path)
    with pytest.raises(ModelError, match=r"logprobs of a packed row differ by .* nats from those of transformers"):
        build_rank(step_config(), model_path=str(tmp_path), device=CPU)


def test_an_attention_named_in_config_json_changes_nothing(tmp_path: Path) -> None:
    save_family("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    check_equality(str(tmp_path), context_tokens=64)
    assert build_rank(step_config(), model_path=str(tmp_path), device=CPU).policy.causal.config.model_type == "qwen3"


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": None}))
    check_trainable("model.path", tmp_path, context_tokens=64)
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(ModelError, match=r"has is_causal=False in config\.json; expected causal attention"):
        check_trainable("model.path", tmp_path, context_tokens=64)


def test_heads_of_absurd_size_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 2**20}))
    with pytest.raises(ModelError, match=r"heads of 1048576 numbers, expected at most 1024"):
        check_equality(str(tmp_path), context_tokens=64)


def test_an_unlisted_family_takes_no_sequence_beyond_its_positions(tmp_path: Path) -> None:
    save_family("persimmon", tmp_path, max_position_embeddings=64)
    check_trainable("model.path", tmp_path, context_tokens=64)
    with pytest.raises(ModelError, match=r"is a persimmon model of 64 positions .* got up to 65 .*; shorten them, or"):
        check_trainable("model.path", tmp_path, context_tokens=65)


def test_state_beside_the_parameters_is_refused(tmp_path: Path) -> None:
    save_family("apertus", tmp_path)
    with pytest.raises(ModelError, match=r"act_fn\.(beta|eps) is no parameter, but part of the weights"):
        build_rank(step_config(), model_path=str(tmp_path), device=CPU)


def test_a_wrong_window_is_refused_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family("mistral", tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def without_window(*args: Any, sliding_window: int | None = None, **options: Any) -> Any:
        return packed_attention(*args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, PACKED_ATTENTION, without_window)
    with pytest.raises(ModelError, match=r"differ by .* nats from those of transformers .*, expected less than 0.0001"):
        build_rank(step_config(), model_path=str(tmp_path), device=CPU)


@pytest.mark.parametrize("name", SOME)
def test_adapters_of_a_family_have_the_gradient_of_transformers(name: str, tmp_path: Path) -> None:
    """With B = 0, the derivative by B of W + s B A is s times the derivative by W, times A^T."""
    pytest.importorskip("peft", reason="the extra peft is not installed")
    save_family(name, tmp_path)
    targets = _linear_layers(name)
    config = step_config("learner.lora={rank: 4, alpha: 8}")  # on all linear layers
    rank, groups = build_rank(config, model_path=str(tmp_path), device=CPU), ragged_groups()
    rank.optimizer = torch.optim.SGD(rank.policy.parameters(), lr=0.0)
    rank.schedule = torch.optim.lr_scheduler.LambdaLR(rank.optimizer, lambda step: 1.0)
    TrainStep(Team(rank), config).step(groups, policy_version=VERSION)
    by_weight = reference_gradient(tmp_path, groups, config)
    given, expected = {}, {}
    for layer, module in rank.policy.causal.named_modules():
        if hasattr(module, "lora_A"):
            adapted: Any = module
            down, up = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
            given[layer] = up.grad
            expected[layer] = 2 * by_weight[f"{layer}.weight"] @ down.detach().T
    assert len(given) == len(targets) * len(decoder_layers(rank.policy.causal))
    assert_same_gradient(given, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_linear_layers_of_a_folder_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    assert sorted(linear_layers(tmp_path)) == _linear_layers(name)


def _linear_layers(name: str) -> list[str]:
    layers = decoder_layers(family_model(name))
    linear = (path for path, module in layers.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({path.rsplit(".", 1)[-1] for path in linear})


def _trained(team: Team, config: Config) -> dict[str, torch.Tensor]:
    """Take a step; return the weights by Hugging Face name."""
    TrainStep(team, config).step(ragged_groups(), policy_version=VERSION)
    return {name: weight.clone() for name, weight in team.whole_weights().items()}


@pytest.mark.full
def test_two_ranks_train_each_family_as_one_process(tmp_path: Path) -> None:
    config, ranks = step_config(), step_config("learner.num_ranks=2", "learner.gradient_checkpointing=true")
    names = [*TRAINED, *UNLISTED]
    for name in names:
        save_family(name, tmp_path / name)
    both = on_ranks(2, [Job(tmp_path / name, ranks, _trained, plain=True) for name in names], tmp_path / "given")
    for name, given in zip(names, both, strict=True):
        alone = on_one(Job(tmp_path / name, config, _trained, plain=True))
        assert given.keys() == alone.keys()
        for weight_name, weight in alone.items():
            torch.testing.assert_close(given[weight_name], weight, rtol=0, atol=1e-5, msg=f"{name}: {weight_name}")


@pytest.mark.parametrize("name", SOME)
def test_a_trained_family_is_reloaded_by_transformers(name: str, tmp_path: Path) -> None:
    save_family(name, tmp_path / "before")
    config = step_config("learner.optimizer.learning_rate=1e-2")
    rank = build_rank(config, model_path=str(tmp_path / "before"), device=CPU)
    weights = _trained(Team(rank), config)
    write_model(tmp_path / "after", rank.policy.causal, weights, tokenizer=make_tiny_tokenizer())
    reloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "after", dtype=torch.float32, attn_implementation="eager"
    )
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "before", dtype=torch.float32)
    own = dict(rank.policy.causal.named_parameters())
    moved = 0.0
    for weight_name, weight in reloaded.named_parameters():
        assert torch.equal(weight, own[weight_name]), weight_name
        moved = max(moved, float((weight - before.get_parameter(weight_name)).detach().abs().max()))
    assert moved > 0
    ids = torch.tensor([[5, 9, 200, 17, 33, 8, 120, 64, 5, 6, 7, 8, 9, 10]])
    rank.policy.causal.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(reloaded.eval()(ids).logits, rank.policy.causal(ids).logits, rtol=0, atol=1e-5)
