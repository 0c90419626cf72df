"""A dry run shows the plan of a host that lacks libraries and programs of the run, and names them."""

import importlib.util
import sys
from pathlib import Path

import pytest

from areal_rloo.errors import UserError
from areal_rloo.launcher import local
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


def test_a_dry_run_refuses_a_mistake_of_the_user() -> None:
    options = parse("local", ["--config", "quickstart.yaml", "model.path=/no/such/folder", "--dry-run"])
    with pytest.raises(UserError, match=r"model\.path: /no/such/folder: no such folder"):
        check(options.config, dry_run=True)
