"""The shipped configs load, match their description, and are part of the wheel."""

import tomllib
from pathlib import Path

import pytest

from areal_rloo.config import Config, NormConfig, SourceConfig, dump_config, load_config
from areal_rloo.tasks.word_problems import Gsm8kTask

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
MOST_LINES = 70


def test_the_quickstart_and_a_config_for_each_task_are_shipped() -> None:
    tasks = {f"{name}_rloo.yaml" for name in ("gsm8k", "math", "svamp", "reasoning_gym")}
    assert {"quickstart.yaml", *tasks} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_loads_by_its_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(path.name)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(str(resolved)) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_is_short_and_commented(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith("# ")
    assert f"--config {path.name}" in lines[1], "the second line is the command that runs it"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_is_rloo(path: Path) -> None:
    algorithm = load_config(str(path)).algorithm
    assert algorithm.adv_norm == NormConfig(mean_level="group", mean_leave1out=True, std_level="none")
    assert algorithm.group_size >= 4
    assert 1 <= algorithm.max_staleness <= 2
    assert algorithm.loss.decoupled


def test_gsm8k_runs_on_a_laptop_with_a_few_overrides(gsm8k_folder: Path) -> None:
    overrides = [
        f"data.train.path={gsm8k_folder / 'train.jsonl'}",
        "rollout.engine=embedded",
        "model.path=tiny",
        "model.tiny.warm_start=null",
        "learner.num_train_steps=3",
        "learner.groups_per_step=2",
        "rollout.sampling.max_new_tokens=32",
    ]
    source = SourceConfig(task="gsm8k", path=str(gsm8k_folder / "train.jsonl"))
    longest = max(len(item.text.encode()) for item in Gsm8kTask(source, 0).items("train"))
    config: Config = load_config("gsm8k_rloo.yaml", overrides)
    assert config.model.tiny.warm_start is None
    assert longest <= config.data.max_prompt_tokens, "the tiny model's tokenizer has one token a byte"
    assert config.context_tokens <= config.model.tiny.max_position


def test_every_config_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["configs"] == "areal_rloo/configs"
    assert wheel["packages"] == ["areal_rloo"]
