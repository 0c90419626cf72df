"""Options of a command line change the tree of a file: set, append to lists, remove."""

import re
from pathlib import Path

import pytest

from areal_rloo.config import check_overrides, check_unique, load_config
from areal_rloo.errors import ConfigError

FILE = """
data:
  train: {task: arithmetic, name: sums, rewards: [{task: arithmetic}]}
  eval: [{task: arithmetic, name: first}, {task: arithmetic, name: second}]
telemetry: {trackers: [wandb]}
algorithm: {preset: grpo, group_size: 4}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.yaml").write_text(FILE)
    return str(tmp_path / "config.yaml")


def test_a_value_is_appended_to_the_list_of_the_file(path: str) -> None:
    config = load_config(path, ["telemetry.trackers+=tensorboard", "--telemetry.trackers+=[mlflow, trackio]"])
    assert config.telemetry.trackers == ("wandb", "tensorboard", "mlflow", "trackio")


def test_a_value_is_appended_to_the_default_of_an_absent_list(path: str) -> None:
    config = load_config(path, ["rollout.episode.type=tool_use", "rollout.episode.tools+=python"])
    assert config.rollout.episode.tools == ("calculator", "python")


def test_a_source_appended_to_a_single_source_is_a_mixture(path: str) -> None:
    reward = "data.train.1.rewards+={task: arithmetic, name: again}"
    config = load_config(path, ["data.train+={task: arithmetic, name: more, rewards: [{task: arithmetic}]}", reward])
    assert [source.label for source in config.data.train_sources] == ["sums", "more"]
    assert [part.label for part in config.data.train_sources[1].rewards] == ["arithmetic", "again"]


def test_a_reward_is_appended_in_a_section(path: str) -> None:
    config = load_config(path, ["data.train.rewards+={task: arithmetic, name: twice, weight: 2}"])
    assert [part.weight for part in config.data.train_sources[0].rewards] == [1.0, 2.0]


def test_a_reward_does_not_replace_that_of_the_task_unseen() -> None:
    more = "data.train.rewards+={function: examples/custom_reward.py:brevity}"
    with pytest.raises(ConfigError, match=r"expected data.train.rewards=\[\{task: arithmetic\}, ...\], got '\+='"):
        load_config("quickstart.yaml", [more])
    rows = ["data.train={task: rows, path: a.jsonl}", more, "~data.eval"]
    assert [part.label for part in load_config("quickstart.yaml", rows).data.train_sources[0].rewards] == ["brevity"]


def test_a_removed_key_has_its_default(path: str) -> None:
    config = load_config(path, ["~data.eval", "~algorithm.group_size"])
    assert config.data.eval is None
    assert config.algorithm.group_size == 8


def test_a_removed_position_leaves_the_others_of_a_list(path: str) -> None:
    config = load_config(path, ["~data.eval.0", "data.eval.0.num_samples=1"])
    assert [source.label for source in config.data.eval_sources] == ["second"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("~data.eval.2", "override '~data.eval.2': 'data.eval.2': expected an index from 0 to 1"),
        ("~learner.num_ranks", "expected a key of the file, got one that the file does not have"),
        ("~data.train.task.x", "'data.train.task' is a value, not a section"),
        ("algorithm.group_size+=1", "expected a list to append to, got '4'"),
        ("learner.num_ranks+=1", "expected a list to append to, got '1'"),
        ("run.seed=1,2", "expected int, got str; the value is '1,2'; to try several, areal-rloo sweep --over run.seed"),
        ("algorithm.nothing+=1", "unknown key 'algorithm.nothing'"),
        ("telemetry.trackers+=nothing", "override 'telemetry.trackers+=nothing': telemetry.trackers.1: expected one"),
        ("+algorithm.group_size=2", "leave out the '+' at the beginning"),
        ("~", "expected key.path=value"),
        ("+=1", "expected key.path=value"),
        ("~data.eval=1", "unknown key '~data'"),
    ],
)
def test_a_wrong_change_names_the_override_and_the_remedy(override: str, expected: str, path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(path, [override])


def test_only_appended_keys_may_be_given_twice() -> None:
    check_unique(["telemetry.trackers+=wandb", "telemetry.trackers+=mlflow", "~data.eval"])
    with pytest.raises(ConfigError, match="expected each key once"):
        check_unique(["~data.eval", "~data.eval"])


def test_a_preset_fills_the_section_of_another_override() -> None:
    algorithm = load_config("quickstart.yaml", ["algorithm={group_size: 3}", "algorithm.preset=grpo"]).algorithm
    assert (algorithm.group_size, algorithm.preset) == (3, "grpo")


def test_a_removed_section_takes_its_keys_along() -> None:
    assert check_overrides(["data.eval.num_prompts=4", "data.eval=null"])
    assert check_overrides(["learner={groups_per_step: 4}", "learner.num_train_steps=5"])
