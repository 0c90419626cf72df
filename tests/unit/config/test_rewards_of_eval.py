"""An evaluation set takes the rewards of the train sources of the same task, unless the config says otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.rewards import check_rewards
from areal_rloo.tasks import check_data

ONE, OTHER = {"function": "math:sqrt"}, {"task": "gsm8k"}


def _loaded(folder: Path, data: dict[str, Any], *overrides: str) -> Config:
    (folder / "my.yaml").write_text(yaml.safe_dump({"data": data}))
    return load_config(str(folder / "my.yaml"), overrides)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # a single source
        ({"train": {"rewards": [ONE]}, "eval": {}}, ["sqrt"]),
        ({"train": {"task": "rows", "rewards": [ONE, OTHER]}, "eval": {"task": "rows"}}, ["sqrt", "gsm8k"]),
        ({"train": {}, "eval": {}}, []),
        # told otherwise
        ({"train": {"rewards": [ONE]}, "eval": {"rewards": []}}, []),
        ({"train": {"rewards": [ONE]}, "eval": {"rewards": [OTHER]}}, ["gsm8k"]),
        # another task keeps the own reward
        ({"train": {"rewards": [ONE]}, "eval": {"task": "gsm8k"}}, []),
        # mixtures
        ({"train": [{"rewards": [ONE]}, {"task": "gsm8k"}], "eval": {}}, ["sqrt"]),
        ({"train": [{"rewards": [ONE]}, {"task": "gsm8k"}], "eval": {"task": "gsm8k"}}, []),
        ({"train": [{"rewards": [ONE]}, {"name": "b", "rewards": [ONE]}], "eval": {"name": "c"}}, ["sqrt"]),
        ({"train": [{"name": "a", "rewards": [ONE]}, {"name": "b", "rewards": [OTHER]}], "eval": {"name": "c"}}, []),
        (
            {"train": [{"name": "a", "rewards": [ONE]}, {"name": "b", "rewards": [OTHER]}], "eval": {"name": "b"}},
            ["gsm8k"],
        ),
        ({"train": [{"name": "a", "rewards": [ONE]}, {"name": "b"}], "eval": {"name": "c"}}, []),
    ],
)
def test_a_set_has_the_rewards_of_the_train_source(data: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    config = _loaded(tmp_path, data)
    (evaluated,) = config.data.eval_sources
    assert [reward.label for reward in evaluated.rewards] == expected
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ("multi_turn", 9)),
        ({"evaluation": {"max_new_tokens": 40}}, ("multi_turn", None)),
        ({"data": {"eval": {"name": "own", "episode": None, "max_new_tokens": 8}}}, (None, 8)),
    ],
)
def test_a_set_has_the_episode_and_the_limit_of_train(more: dict[str, Any], expected: object, tmp_path: Path) -> None:
    train = {"episode": {"type": "multi_turn"}, "max_new_tokens": 9}
    tree = {**more, "data": {"eval": {}, **more.get("data", {}), "train": train}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(str(tmp_path / "my.yaml"))
    (evaluated,) = config.data.eval_sources
    assert (evaluated.episode and evaluated.episode.type, evaluated.max_new_tokens) == expected
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "resolved.yaml")) == config


def test_rewards_of_an_override_reach_the_set(tmp_path: Path) -> None:
    config = _loaded(
        tmp_path, {"eval": [{}, {"name": "own"}]}, f"data.train.rewards={json.dumps([ONE])}", "data.eval.1.rewards=[]"
    )
    assert [len(source.rewards) for source in config.data.eval_sources] == [1, 0]


def test_an_error_says_if_the_rewards_are_those_of_train(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def close(completion, level): ...\n")
    for split, row in (("train", {"prompt": "p", "level": 1}), ("test", {"prompt": "q"})):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    train = {
        "task": "rows",
        "path": str(tmp_path / "train.jsonl"),
        "rewards": [{"function": f"{tmp_path}/mine.py:close"}],
    }
    config = _loaded(tmp_path, {"train": train, "eval": {"task": "rows"}})
    with pytest.raises(ConfigError) as caught:
        check_rewards(config.data, check_data(config.data))
    assert str(caught.value).startswith("data.eval.rewards.0.function: ")
    assert str(caught.value).endswith("; data.eval has the rewards of data.train unless data.eval.rewards is set")
    config = _loaded(tmp_path, {"train": {"rewards": train["rewards"]}, "eval": {}})
    with pytest.raises(ConfigError) as caught:
        check_rewards(config.data, check_data(config.data))
    assert str(caught.value).startswith("data.train.rewards.0.function: close has the parameter 'level'")
    assert "data.eval" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["data: 5", "data: {train: 5, eval: [1]}", "data: {eval: {rewards: 5}}", "data: {train: []}"]
)
def test_a_wrong_type_of_data_stays_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"my\.yaml:1: data"):
        load_config(str(tmp_path / "my.yaml"))
