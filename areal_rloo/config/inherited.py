"""Give evaluation sets the rewards of the train sources, in the tree of a config before the structs.

The resolved config has the rewards of each set. An empty list in the file stays: the reward of the task alone.
"""

from __future__ import annotations

import copy
from typing import Any

from areal_rloo.config.data import ConfiguredSource, DataConfig

Tree = dict[str, Any]


def fill_rewards(tree: Tree) -> None:
    """Fill the absent `rewards` of each evaluation set, if the train sources of the same task agree.

    If one of these sources has the name of the set, only this source counts.
    """
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    for evaluated in _sources(data.get("eval")):
        of_task = [train for train in _sources(data.get("train")) if _task(train) == _task(evaluated)]
        named = [train for train in of_task if _label(train) == _label(evaluated)]
        rewards = [train.get("rewards") for train in named or of_task]
        if "rewards" not in evaluated and rewards and rewards[0] and rewards.count(rewards[0]) == len(rewards):
            evaluated["rewards"] = copy.deepcopy(rewards[0])


def takes_rewards_of_train(source: ConfiguredSource, data: DataConfig) -> bool:
    """Return True if a set has the rewards of a train source with the same task, perhaps filled in."""
    return bool(source.rewards) and (source.task, source.rewards) in [(t.task, t.rewards) for t in data.train_sources]


def _sources(given: Any) -> list[Tree]:
    return [source for source in (given if isinstance(given, list) else [given]) if isinstance(source, dict)]


def _task(source: Tree) -> Any:
    return source.get("task", ConfiguredSource().task)


def _label(source: Tree) -> Any:
    return source.get("name") or _task(source)
