"""docs/rewards.md is right: its config loads, its functions are rewards, its reasons and metrics exist."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from support.documents import the_block
from support.metric_names import metric_names
from support.reward_requests import reward_request

from areal_rloo.config import load_config
from areal_rloo.rewards import check_rewards
from areal_rloo.rewards.functions import FunctionReward
from areal_rloo.rewards.request import FailureReason
from areal_rloo.tasks import check_data
from areal_rloo.telemetry.metric import PREFIX
from areal_rloo.trajectory import Item

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_document_s_config_passes_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(the_block(TEXT, "python"))
    (tmp_path / "my.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "my.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load(the_block(TEXT, "yaml")), "model": {"path": "tiny"}})
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("my.yaml", ["data.eval=null"])
    check_rewards(config.data, check_data(config.data))
    labels = [reward.label for reward in config.data.train_sources[0].rewards]
    assert labels == ["exact", "judge", "gsm8k", "service", "preference"]


def test_the_document_s_functions_return_rewards(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(the_block(TEXT, "python"))
    request = reward_request(" 2", Item("1+1", "2"), turns=("a", " 2"), completion_ids=(2, 3))
    functions = {
        name: FunctionReward("key", f"{tmp_path / 'my_rewards.py'}:{name}", returns="token")
        for name in ("exact", "judged", "by_turn")
    }
    assert functions["exact"].score(request).reward == 1
    assert functions["by_turn"].score(request).turn_rewards == (0.5, 0.5)
    assert [name for name, function in functions.items() if function.is_async] == ["judged"]


def test_the_document_lists_all_reasons_and_real_metrics() -> None:
    assert set(re.findall(r"^\| `(reward_\w+)`", TEXT, re.MULTILINE)) == set(get_args(FailureReason))
    named = {PREFIX + name for name in re.findall(r"`(\w+_total|reward_parts)`", TEXT)}
    assert len(named) == 5
    assert named <= metric_names()
