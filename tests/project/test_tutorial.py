"""The task of docs/tutorial.md passes all checks of a start, and its reward marks the correct answer."""

import re
from pathlib import Path

import pytest
from support.documents import the_block
from support.reward_requests import reward_request

from areal_rloo.config import load_config
from areal_rloo.rewards import check_rewards
from areal_rloo.rewards.functions import FunctionReward
from areal_rloo.tasks import check_data
from areal_rloo.trajectory import Item

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_task_of_the_tutorial_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward.py").write_text(the_block(TEXT, "python"))
    (row,) = re.findall(r"# (\{.*\})$", the_block(TEXT, "yaml"), re.MULTILINE)
    (tmp_path / "my.jsonl").write_text(f"{row}\n")
    (tmp_path / "my.yaml").write_text(the_block(TEXT, "yaml"))
    monkeypatch.chdir(tmp_path)
    config = load_config("my.yaml")
    check_rewards(config.data, check_data(config.data))
    reward, item = FunctionReward("key", "my_reward.py:score", returns="trajectory"), Item("2+3=?\n", "5")
    scored = {text: reward.score(reward_request(text, item)).reward for text in ("It is 5", "It is 6")}
    assert scored == {"It is 5": 1.0, "It is 6": 0.0}
