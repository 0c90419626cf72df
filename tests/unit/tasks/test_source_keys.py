"""An error of a source begins with the key of the source, as the user wrote the key in the config."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_rloo.config import DataConfig, FewShotConfig, RewardConfig, SourceConfig
from areal_rloo.errors import ConfigError, DataError
from areal_rloo.rewards import check_rewards
from areal_rloo.tasks import check_data, load_train


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "a.jsonl"}, "path: the task arithmetic generates its items; leave path out"),
        ({"parameters": {"x": 1}}, "parameters.x: the task has no such parameter"),
        ({"task": "arithmetics"}, "task: unknown task 'arithmetics'"),
        ({"task": "nowhere.py:Task"}, "task: nowhere.py cannot be imported"),
        ({"task": "os:system"}, "task: expected os:system to be a subclass"),
        ({"task": "rows", "hub": "a/b"}, "task: rows has no reward of its own"),
        ({"rewards": [{"task": "rows"}]}, "rewards.0.task: rows has no reward of its own"),
        ({"rewards": [{"task": "maths"}]}, "rewards.0.task: unknown task 'maths'"),
        ({"rewards": [{"task": "gsm8k", "parameters": {"x": 1}}]}, "rewards.0.parameters.x: the task has no such"),
    ],
)
def test_an_error_of_a_source_begins_with_its_key_in_the_config(source: dict[str, Any], words: str) -> None:
    wrong = {"name": "second", **source}
    for key, data in (
        ("data.train", {"train": wrong}),
        ("data.train.0", {"train": [wrong]}),
        ("data.train.1", {"train": [{}, wrong]}),
        ("data.eval", {"eval": wrong}),
        ("data.eval.1", {"eval": [{}, wrong]}),
    ):
        config = msgspec.convert(data, DataConfig)
        with pytest.raises((DataError, ConfigError)) as caught:
            check_rewards(config, check_data(config))
        assert str(caught.value).startswith(f"{key}.{words}")


def test_an_error_found_by_the_learner_begins_with_the_key_of_the_source(tmp_path: Path) -> None:
    path = str(tmp_path / "a.jsonl")
    Path(path).write_text('{"question": "q0", "answer": "#### 0"}\n{"question": "q1", "answer": "#### 1"}\n')
    few = SourceConfig(task="gsm8k", path=path, name="few", few_shot=FewShotConfig(num=7))
    shown = SourceConfig(name="shown", few_shot=FewShotConfig(path=path))
    without = SourceConfig(task="rows", name="without", rewards=(RewardConfig(function="math:sqrt"),))
    for wrong, words in (
        (few, "few_shot.num: expected at most 2 (all items), got 7"),
        (shown, "few_shot.path: the task arithmetic generates its items"),
        (without, "path: the task rows needs a file or a hub dataset; set path or hub"),
    ):
        with pytest.raises(DataError) as caught:
            load_train(DataConfig(train=(SourceConfig(), wrong)), seed=0)
        assert str(caught.value).startswith(f"data.train.1.{words}")


def test_an_error_raised_by_a_custom_task_gets_the_key_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from areal_rloo.errors import DataError\n"
        "from areal_rloo.tasks.rows import RowTask\n"
        "class Mine(RowTask):\n"
        "    def __init__(self, source, seed):\n"
        "        super().__init__(source, seed)\n"
        "        raise DataError('no such dialect')\n"
        "    def item(self, row, where): ...\n"
        "    def reward(self, completion, item): ...\n"
    )
    for parameters, words in (({}, ": no such dialect"), ({"x": 1}, ".parameters.x: the task has no such parameter")):
        wrong = SourceConfig(task=f"{tmp_path / 'mine.py'}:Mine", parameters=parameters)
        with pytest.raises(DataError) as caught:
            check_data(DataConfig(train=(SourceConfig(), wrong)))
        assert str(caught.value).startswith(f"data.train.1{words}")
