"""The shipped configs load, match their description, and are part of the wheel."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from areal_rloo.config import Config, NormConfig, SourceConfig, dump_config, load_config
from areal_rloo.launcher.start import parse
from areal_rloo.tasks.word_problems import Gsm8kTask

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
PEERS = {f"gsm8k_rloo_{name}.yaml" for name in ("areal", "verl", "trl", "ms_swift")}  # with the settings of a system
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
    assert any(f"--config {path.name}" in line for line in lines[1:3]), "the command that runs it stands first"


def test_a_config_of_another_system_has_its_settings() -> None:
    """The values of AReaL's gsm8k_rloo.yaml, of verl's and ms-swift's scripts, and the defaults of TRL."""
    found = {}
    for name in PEERS:
        config = load_config(name)
        algorithm, learner, optimizer = config.algorithm, config.learner, config.learner.optimizer
        found[name.removeprefix("gsm8k_rloo_").removesuffix(".yaml")] = (
            *(learner.groups_per_step, algorithm.group_size, learner.num_minibatches, algorithm.max_staleness),
            *(algorithm.loss.eps_low, algorithm.loss.eps_high, algorithm.loss.dual_clip, algorithm.kl.coefficient),
            *(optimizer.learning_rate, optimizer.betas[1], optimizer.weight_decay, optimizer.schedule),
            *(config.rollout.sampling.max_new_tokens, algorithm.preset),
        )
    assert found == {
        "areal": (256, 4, 1, 2, 0.4, 0.4, None, 0, 1.7e-5, 0.999, 0.017, "constant", 1024, "rloo"),
        "verl": (1024, 5, 4, 0, 0.2, 0.2, 3.0, 0.001, 1e-6, 0.999, 0.01, "constant", 2048, "rloo_verl"),
        "trl": (32, 2, 1, 0, 0.2, 0.2, None, 0.05, 1e-6, 0.999, 0, "linear", 512, "rloo_trl"),
        "ms_swift": (4, 16, 1, 0, 3e-4, 4e-4, None, 0.001, 1e-6, 0.95, 0.1, "cosine", 1024, "rloo_ms_swift"),
    }
    areal = load_config("gsm8k_rloo_areal.yaml").algorithm
    norm = areal.reward_norm
    assert (norm.mean_level, norm.mean_leave1out, norm.std_level) == ("group", True, "none")
    assert (areal.adv_norm.mean_level, areal.adv_norm.std_level, areal.adv_norm.over) == ("batch", "batch", "tokens")
    assert (areal.rewards.scale, areal.rewards.bias) == (10, -0.5)
    assert (areal.loss.behaviour_weight.rule, areal.loss.behaviour_weight.upper) == ("mask", 5)


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.name not in PEERS], ids=lambda path: path.name)
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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_commands_of_an_example_can_be_pasted(path: Path) -> None:
    """From the file itself: a shell sees no escapes of Python."""
    commands = re.findall(r"^    (python (?:.*\\\n)*.*)", path.read_text(), re.MULTILINE)
    assert commands, "the file shows how to start it"
    for command in commands:
        _, *words = shlex.split(command.replace("\\\n", " "))
        assert "\\" not in words
        if words[:2] == ["-m", "areal_rloo.launcher.local"]:
            assert parse("local", words[2:]).config.learner.num_train_steps == 20
