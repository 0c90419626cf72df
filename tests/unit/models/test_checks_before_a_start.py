"""What a start finds out about the files of a model before any process loads them, each on a real folder."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.requests_to_serve import mixed_requests, serving
from support.situations import check_copies_here, config

from areal_rloo.config import TinyModelConfig
from areal_rloo.engines.embedded.engine import EmbeddedEngine
from areal_rloo.errors import ModelError
from areal_rloo.launcher import start
from areal_rloo.models import equality
from areal_rloo.models.loading import load_policy
from areal_rloo.models.tiny import make_tiny_model, make_tiny_tokenizer, save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model of a listed family, whose head is tied to the embedding."""
    save_family("qwen2", tmp_path, tie_word_embeddings=True)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _changed(folder: Path, file: str, **changes: object) -> None:
    path = folder / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | changes))


def _rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _other_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def _same_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def _short_norm(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def _complex(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.complex64)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "stop token in words": (
        lambda folder: _changed(folder, "generation_config.json", eos_token_id="</s>"),
        "a completion ends at token </s> .*expected an id below vocab_size=300",
    ),
    "stop token of another model": (
        lambda folder: _changed(folder, "generation_config.json", eos_token_id=[1, 300]),
        "a completion ends at token 300 ",
    ),
    "tokenizer that is no JSON": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        r"the tokenizer of .* cannot be loaded: .*download its files again \(tokenizer\.json",
    ),
    "tokenizer of options alone": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer in it"),
    "half a template": (
        lambda folder: _changed(folder, "tokenizer_config.json", chat_template="{{ messages[0]['content'"),
        "chat_template of the tokenizer is no template: unexpected end of template",
    ),
    "tokenizer of another model": (
        lambda folder: save_family("qwen2", folder, tie_word_embeddings=True, vocab_size=200),
        "58 of 259 tokens of the tokenizer have ids beyond vocab_size=200",
    ),
    "another head": (
        lambda folder: _rewritten(folder, _other_head),
        r"has lm_head\.weight beside model\.embed_tokens\.weight with other values, and tie_word_embeddings=true",
    ),
    "shape of a norm": (
        lambda folder: _rewritten(folder, _short_norm),
        r"has model\.norm\.weight of shape \[63\], expected \[64\] by config\.json",
    ),
    "complex numbers": (lambda folder: _rewritten(folder, _complex), r"of complex numbers \(C64\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_start_refuses_files_that_a_process_could_not_use(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_copies_here(monkeypatch)
    change, words = REFUSED[name]
    change(folder)
    with pytest.raises(ModelError, match=f"^model.path: .*{words}"):
        start.check(config(f"model.path={folder}"))


def test_a_missing_config_of_the_tokenizer_is_named(tmp_path: Path) -> None:
    """Without it, the end of a sequence is a new token, which a small vocabulary has not."""
    save_tiny_model(make_tiny_model(TinyModelConfig(num_layers=1)), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"a completion ends at token 258 .*; copy the missing tokenizer_config\.json"):
        start.check(config(f"model.path={tmp_path}"))


def test_a_start_takes_a_whole_model_and_a_dry_run_spares_the_seconds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _rewritten(folder, _same_head)  # as some checkpoints have it
    _changed(folder, "generation_config.json", eos_token_id=[1, 299])
    assert start.check(config(f"model.path={folder}")) == []
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert start.check(config(f"model.path={folder}"), dry_run=True) == []


def test_the_check_is_the_one_of_the_module(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert equality.main([str(folder), "64", "weights", "tokens"]) == 0
    _rewritten(folder, _other_head)
    assert equality.main([str(folder), "64", "tokens"]) == 0
    assert equality.main([str(folder), "64", "weights", "tokens"]) == 2
    assert "with other values" in capsys.readouterr().err


def test_a_reference_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_family("qwen2", other, vocab_size=100)
    named = (f"model.path={folder}", f"model.reference.path={other}", "algorithm.kl.coefficient=0.1")
    with pytest.raises(ModelError, match=r"^model\.reference\.path: .* vocabulary of 100, expected the policy's 300"):
        start.check(config(*named))


def test_an_attention_named_in_config_json_is_not_used(folder: Path) -> None:
    _changed(folder, "config.json", _attn_implementation="flash_attention_2")
    assert load_policy(str(folder), device=torch.device("cpu")).config._attn_implementation == "areal_rloo_packed"


def test_weights_that_are_no_numbers_end_the_engine_with_a_line(folder: Path) -> None:
    _rewritten(folder, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    with serving(folder) as engine:
        assert isinstance(engine, EmbeddedEngine)
        (future, *_) = engine.submit(mixed_requests(1))
        with pytest.raises(ModelError, match="the weights of version 0 give a logprob of nan, expected a number"):
            future.result(60)
