"""Fill values that follow from others, in the tree of a config before the structs: the resolved config has them.

Evaluation sets get rewards, episode and limit of the train sources. A value in the file stays: an empty list of rewards
is the reward of the task alone. The path of a chat template becomes the text, so every process of a run, and a later
resume, has the same template.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from areal_rloo.config.data import ConfiguredSource, DataConfig
from areal_rloo.config.reading import is_allowed
from areal_rloo.errors import ConfigError, shown

_MOST_TEMPLATE = 50_000  # characters: half of the limit for all texts of a config

Tree = dict[str, Any]


def fill_sets(tree: Tree) -> None:
    """Fill absent keys of each evaluation set, if the train sources of the same task agree.

    If one of these sources has the name of the set, only this source counts.
    """
    data, evaluation = tree.get("data"), tree.get("evaluation")
    if not isinstance(data, dict):
        return
    limited = isinstance(evaluation, dict) and evaluation.get("max_new_tokens") is not None
    for evaluated in _sources(data.get("eval")):
        of_task = [train for train in _sources(data.get("train")) if _task(train) == _task(evaluated)]
        named = [train for train in of_task if _label(train) == _label(evaluated)]
        for key in ("rewards", "episode", *(() if limited else ("max_new_tokens",))):
            values = [train.get(key) for train in named or of_task]
            if key not in evaluated and values and values[0] and values.count(values[0]) == len(values):
                evaluated[key] = copy.deepcopy(values[0])


def fill_template(tree: Tree) -> None:
    """Replace the path of a chat template by the text; a text with a brace is a template.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """
    data = tree.get("data")
    given = data.get("chat_template") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(given, str):
        return
    where, text = "data.chat_template", given
    if "{" not in given:
        where = f"data.chat_template: {shown(given)}"
        try:
            with Path(given).open(encoding="utf-8-sig") as file:
                text = file.read(_MOST_TEMPLATE + 1)
        except (OSError, ValueError) as error:
            words = "expected true, false, null, or the file of a template"
            raise ConfigError(f"{where}: cannot be read: {error}; {words}") from error
    if "{" not in text or len(text) > _MOST_TEMPLATE or not all(map(is_allowed, text)):
        expected = f"expected a Jinja template of at most {_MOST_TEMPLATE} visible characters, with {{{{ or {{% in it"
        raise ConfigError(f"{where}: {expected}, got {shown(text[:60])}")
    data["chat_template"] = text


def takes_rewards_of_train(source: ConfiguredSource, data: DataConfig) -> bool:
    """Return True if a set has the rewards of a train source with the same task, perhaps filled in."""
    return bool(source.rewards) and (source.task, source.rewards) in [(t.task, t.rewards) for t in data.train_sources]


def _sources(given: Any) -> list[Tree]:
    return [source for source in (given if isinstance(given, list) else [given]) if isinstance(source, dict)]


def _task(source: Tree) -> Any:
    return source.get("task", ConfiguredSource().task)


def _label(source: Tree) -> Any:
    return source.get("name") or _task(source)
