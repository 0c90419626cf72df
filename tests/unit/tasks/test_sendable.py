"""Rows and items that no rollout worker could read are refused at load, with the place."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_rloo.config import ConfiguredSource, DataConfig, RewardConfig, SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks import Item, Split, Task, check_data, load_train
from areal_rloo.tasks.base import LazyItems
from areal_rloo.tasks.sendable import MOST_DEPTH
from areal_rloo.wire.codec import decode_learner, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Lease, Leases


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def rows(path: Path, *fields: Any) -> DataConfig:
    if path.suffix == ".json":
        path.write_text(json.dumps([{"prompt": "p", "x": each} for each in fields]))
    else:
        path.write_text("".join(json.dumps({"prompt": "p", "x": each}) + "\n" for each in fields))
    source = SourceConfig(task="rows", path=str(path), rewards=(RewardConfig(function="math:sqrt"),))
    return DataConfig(train=source, eval=None)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("depth", [MOST_DEPTH, 500, 900])
def test_a_deeply_nested_row_is_refused_with_file_and_row(tmp_path: Path, name: str, depth: int) -> None:
    data = rows(tmp_path / name, 1, nested(depth))
    place = f"{tmp_path / name}: row 2" if name == "a.json" else f"{tmp_path / name}:2"
    with pytest.raises(DataError, match=f"^{re.escape(place)}: expected fields .* of at most 64 nested levels"):
        check_data(data)
    with pytest.raises(DataError, match="at most 64 nested levels"):
        load_train(data, seed=0)


def test_a_row_at_the_limit_of_depth_reaches_the_worker(tmp_path: Path) -> None:
    data = rows(tmp_path / "a.jsonl", nested(MOST_DEPTH - 1))
    check_data(data)
    item = load_train(data, seed=0)[0].items[0]
    leases = Leases("l", (Lease(1, 1, (0,), (1,), item, 0, 1),))
    assert decode_learner(encode(leases), Limits()) == leases


def test_an_item_above_the_limit_is_refused_with_its_place(tmp_path: Path) -> None:
    data = rows(tmp_path / "a.jsonl", 1, "x" * 2000)
    words = r"a\.jsonl: item 2 \('p'\): expected at most 2000 bytes .* got 20\d\d; leave out fields"
    with pytest.raises(DataError, match=words):
        check_data(data, most_item_bytes=2000)
    with pytest.raises(DataError, match=words):
        load_train(data, seed=0, most_item_bytes=2000)
    assert len(load_train(data, seed=0, most_item_bytes=4000)[0].items) == 2


MADE = [Item("p"), Item("q", fields={"x": nested(990)})]


class DeepTask(Task):
    """A user's task whose second item cannot be sent."""

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        del source, seed

    def items(self, split: Split) -> Sequence[Item]:
        del split
        return MADE

    def reward(self, completion: str, item: Item) -> float:
        raise NotImplementedError


class LazyTask(DeepTask):
    """The same items, made on access."""

    def items(self, split: Split) -> Sequence[Item]:
        del split
        return LazyItems(2, MADE.__getitem__)


def test_items_of_a_users_task_are_refused_before_a_lease() -> None:
    words = r"item 2 \('q'\): expected fields .* of at most 64 nested levels"
    with pytest.raises(DataError, match=words):
        load_train(DataConfig(train=SourceConfig(task=f"{__file__}:DeepTask"), eval=None), seed=0)
    (lazy,) = load_train(DataConfig(train=SourceConfig(task=f"{__file__}:LazyTask"), eval=None), seed=0)
    assert lazy.items[0].text == "p"
    with pytest.raises(DataError, match=words):
        lazy.items[1]
