"""A dry run shows the plan of a host that lacks libraries and programs of the run, and names them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import UserError
from areal_rloo.launcher import local, start
from areal_rloo.launcher.fit import memory_words, model_sizes
from areal_rloo.launcher.start import check, parse


def _without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in modules else find(name, *rest))
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("config", "overrides", "module", "words"),
    [
        ("gsm8k_rloo.yaml", ["rollout.sglang.python=/nowhere/python"], "sglang", "rollout.sglang.python: expected"),
        ("math_rloo.yaml", ["rollout.engine=embedded"], "math_verify", "data.train.0.task: math needs math-verify"),
        ("reasoning_gym_rloo.yaml", ["rollout.engine=embedded"], "reasoning_gym", "data.train.0.task: reasoning_gym"),
        ("quickstart.yaml", ["learner.lora={}"], "peft", "learner.lora: peft is not installed"),
        ("gsm8k_rloo.yaml", ["rollout.engine=embedded"], "datasets", "data.train.path: null means the hub"),
    ],
)
def test_a_dry_run_shows_the_plan_and_names_what_is_missing(
    config: str,
    overrides: list[str],
    module: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    _without(monkeypatch, module)
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", config, *overrides]
    assert local.main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "PROCESS" in shown.out
    assert "learner: a rank needs about" in shown.out
    assert f"not installed here: {words}" in shown.err
    with pytest.raises(UserError, match=words.split(":", maxsplit=1)[0]):
        local.main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_first_which_gpu_is_missing_or_described(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "gsm8k_rloo.yaml", "rollout.sglang.python=/nowhere/python"]
    assert local.main([*arguments, "--dry-run"]) == 0
    assert re.match(
        r"no GPU on \S+: rollout\.engine=sglang needs one GPU of 40 GB or more, better one GPU of 48 GB",
        capsys.readouterr().err,
    )
    assert local.main([*arguments, "launcher.memory_per_gpu=48GB", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("GPUs described, not found: 1 of 44.7 GiB (48 GB); ")
    assert "no GPU" not in shown.err
    assert (
        "fits into a GPU's 44.7 GiB (48 GB); learner and engine share the devices side by side; an engine has about"
        in shown.out
    )
    with pytest.raises(UserError, match=r"launcher\.memory_per_gpu: expected a GPU on"):
        local.main([*arguments, "launcher.memory_per_gpu=48GB"])
    with pytest.raises(UserError, match=r"no GPU on .*; besides, rollout\.sglang\.python: .* found none at \S+$"):
        local.main(arguments)
    with pytest.raises(UserError, match=r"no GPU on .*; with launcher\.memory_per_gpu=48GB a dry run shows the plan"):
        local.main([*arguments, "learner.device=cuda", "--dry-run"])
    assert capsys.readouterr().err == ""


def test_a_start_without_the_gpu_that_a_config_needs_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whether the server is here or not: data, network and memory would be mended in vain."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "check_server", lambda situation: ())
    with pytest.raises(UserError, match=r"^no GPU on \S+: rollout\.engine=sglang needs .*, or set rollout\.device=cpu"):
        local.main(["--config", "gsm8k_rloo.yaml"])
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_that_a_host_has_too_little_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "gsm8k_rloo.yaml", "launcher.memory_per_gpu=80GB", "--dry-run"]
    assert local.main([*arguments, "launcher.memory_per_host=16GB"]) == 0
    words = r"host memory: 14\.9 GiB, and a run takes about \S+ GiB: loads and checkpoints .*; a start there would be"
    assert re.search(words, capsys.readouterr().err)
    assert local.main([*arguments, "launcher.memory_per_host=64GB"]) == 0
    assert "host memory" not in capsys.readouterr().err
    assert local.main(arguments) == 0
    assert re.search(r"host memory: unknown \(.*\); a run takes about \S+ GiB: ", capsys.readouterr().err)


def test_a_local_dry_run_says_that_several_hosts_would_be_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "quickstart.yaml", "launcher.num_hosts=2"]
    assert local.main([*arguments, "--dry-run"]) == 0
    words = "launcher.num_hosts: expected 1 with the local launcher, got 2"
    assert f"a start would be refused: {words}" in capsys.readouterr().err
    with pytest.raises(UserError, match=words):
        local.main(arguments)


def test_a_model_that_is_not_here_needs_only_its_config_json(tmp_path: Path) -> None:
    config = load_config("gsm8k_rloo.yaml", ["model.path=some/model"])
    assert model_sizes(config, {}) is None
    words = memory_words(config, [], None)
    assert words.startswith("learner: some/model is not here yet, so its memory is unknown; a folder with its config")
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "intermediate_size": 128, '
        '"num_hidden_layers": 2}'
    )
    followed = load_config("gsm8k_rloo.yaml", [f"model.path={tmp_path}"])
    assert model_sizes(followed, {}) is not None


def test_a_dry_run_plans_for_a_folder_with_config_json_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As the words of the dry run before advise."""
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    described = {"model_type": "qwen2", "vocab_size": 99, "intermediate_size": 128, "max_position_embeddings": 4096}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, **described}))
    arguments = ["--config", "gsm8k_rloo.yaml", "model.path=model", "rollout.engine=embedded"]
    assert local.main([*arguments, "launcher.memory_per_gpu=24GB", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "fits into a GPU's 22.4 GiB" in shown.out
    assert "not installed here: model.path: model: no model.safetensors in it" in shown.err
    with pytest.raises(UserError, match=r"model\.path: model: no model\.safetensors in it"):
        local.main(arguments)


@pytest.mark.parametrize("engine", ["embedded", "sglang", "vllm"])
def test_a_dry_run_plans_for_more_gpus_than_are_here(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    described = ["launcher.memory_per_gpu=24GB", "launcher.gpus_per_host=3"]
    assert local.main(["--config", "gsm8k_rloo.yaml", f"rollout.engine={engine}", *described, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("GPUs described, not found: 3 of 22.4 GiB (24 GB); ")
    assert "3 of 3 GPUs" in shown.out


def test_a_dry_run_says_how_many_gpus_are_unused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    described = ["launcher.memory_per_gpu=24GB", "launcher.gpus_per_host=4"]
    assert local.main(["--config", "quickstart.yaml", *described, "--dry-run", "--json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    (words,) = [line for line in lines if line.startswith("2 of 4 GPUs are used; set ")]
    changes = words.partition("; set ")[2].partition(" to use 4")[0].split()
    assert local.main(["--config", "quickstart.yaml", *described, *changes, "--dry-run", "--json"]) == 0
    assert "GPUs are used" not in capsys.readouterr().err


def test_a_dry_run_refuses_a_downloaded_model_that_a_run_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen2_moe"}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match="is a qwen2_moe model"):
        local.main(["--config", "quickstart.yaml", "model.path=org/name", "--dry-run"])


def test_a_dry_run_names_a_model_that_cannot_be_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["--config", "quickstart.yaml", "model.path=org/name"]
    assert local.main([*arguments, "--dry-run"]) == 0
    words = f"model.path: org/name: not in {tmp_path / 'hf' / 'hub'}, and HF_HUB_OFFLINE is set"
    assert f"not installed here: {words}" in capsys.readouterr().err
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        local.main(arguments)


def test_a_dry_run_refuses_a_mistake_of_the_user() -> None:
    options = parse("local", ["--config", "quickstart.yaml", "model.path=/no/such/folder", "--dry-run"])
    with pytest.raises(UserError, match=r"model\.path: /no/such/folder: no such folder"):
        check(options.config, dry_run=True)


def test_a_dry_run_says_that_processes_wait_for_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for workers, says in ((3, True), (1, False)):
        options = ["launcher.cores_per_host=2", f"rollout.num_workers={workers}"]
        assert local.main(["--config", "quickstart.yaml", *options, "--dry-run"]) == 0
        assert ("4 processes compute on 2 cores of" in capsys.readouterr().err) == says


def test_a_python_without_the_packages_is_named_in_a_line() -> None:
    """Without `site`, the packages of the environment are not there."""
    command = [sys.executable, "-S", "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "lacks the packages of areal_rloo; use .venv/bin/python" in ended.stderr
