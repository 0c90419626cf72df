"""Whole runs that train adapters: the embedded engine gets the adapters alone, and a resume needs the same model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.local_runs import Run, balanced

from areal_rloo.config import TinyModelConfig
from areal_rloo.models.tiny import make_tiny_model, save_tiny_model

pytestmark = pytest.mark.slow
pytest.importorskip("peft", reason="the extra peft is not installed")


def _reward(folder: Path) -> str:
    (folder / "low.py").write_text("def low(completion: str) -> float:\n    return float(len(completion) % 2)\n")
    return f"{folder}/low.py:low"


@pytest.mark.rare
def test_adapters_go_on_from_a_checkpoint_with_the_same_model_alone(start: Callable[..., Run], tmp_path: Path) -> None:
    """Without staleness, each token compares the engine's weights with those of the learner."""
    model = tmp_path / "model"
    save_tiny_model(make_tiny_model(TinyModelConfig(hidden_size=48, num_layers=2)), model)
    options = (
        f"data.train.rewards=[{{function: '{_reward(tmp_path)}'}}]",
        *(f"model.path={model}", "learner.lora={rank: 8}", "learner.optimizer.learning_rate=0.01", "data.eval=null"),
        *("algorithm.max_staleness=0", "evaluation.every_n_versions=0"),
    )
    for num_steps, resume in ((3, ()), (6, ("--resume",))):
        run = start(*options, f"learner.num_train_steps={num_steps}", *resume)
        code, output = run.wait()
        assert code == 0, output
        assert run.summary()["num_train_steps"] == num_steps
    records = run.records()
    assert [record.num_train_steps for record in records] == list(range(1, 7))
    assert max(record.mismatch_abs_mean for record in records) < 1e-4, "the engine has other weights"
    assert max(record.gradient_norm for record in records) > 0, "the adapters change"
    assert balanced(run.summary()["ledger"])
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run = start(*options, "learner.num_train_steps=9", "--resume")
    code, output = run.wait()
    assert code == 2, output
    assert f"error: model.path: {model} has other weights, or another config.json, than the model with which" in output
    assert len(run.records()) == 6
    run = start(*options, "learner.lora.publish=merged", "learner.num_train_steps=7", "--resume")
    code, output = run.wait()
    assert code == 0, output
    assert torch.isfinite(torch.tensor(run.records()[-1].mismatch_abs_mean))
    assert run.records()[-1].mismatch_abs_mean < 1e-4, "whole weights come from the checkpoint"


def test_a_worker_with_another_model_generates_no_token(start: Callable[..., Run], tmp_path: Path) -> None:
    """The worker reads other files at the same path, as on a host with a copy of its own; here only for the digest."""
    model, other = tmp_path / "model", tmp_path / "other"
    for seed, folder in enumerate((model, other)):
        save_tiny_model(make_tiny_model(TinyModelConfig(hidden_size=48, num_layers=2, seed=seed)), folder)
    entry = tmp_path / "elsewhere.py"
    entry.write_text(
        "import pathlib, sys, __main__\n"
        "if 'areal_rloo.rollout' in sys.orig_argv:\n"
        "    digest = __main__.digest_of_files\n"
        f"    __main__.digest_of_files = lambda _: digest(pathlib.Path({str(other)!r}))\n"
    )
    run = start(
        f"model.path={model}", "learner.lora={rank: 8}", "learner.num_train_steps=2", "data.eval=null", entry=entry
    )
    code, output = run.wait()
    assert code == 2, output
    assert f"model.path: {model} has other weights, or another config.json, than the model with which" in output
    assert run.records() == []
