"""The quick check of the data before anything starts: tasks, rewards, and every row of files that are not huge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_rloo.config import ConfiguredSource, DataConfig, import_function
from areal_rloo.errors import DataError
from areal_rloo.models.folder import check_model_folder
from areal_rloo.tasks.base import Split
from areal_rloo.tasks.loading import eval_sources
from areal_rloo.tasks.registry import make_task
from areal_rloo.tasks.scorer import RewardPart, reward_parts, task_source

_READ_BYTES = 64 * 2**20  # about a second


def check_data(data: DataConfig) -> None:
    """Tasks are known and take their parameters, files are there and their rows in order, rewards can be imported.

    Files beyond `_READ_BYTES` the learner reads first: they would hold up the start twice.

    Raises:
        DataError: a task or a file.
        ConfigError: an import path.
        ModelError: the folder of a reward model.
    """
    splits: tuple[tuple[Split, Sequence[ConfiguredSource]], ...] = (
        ("train", data.train_sources),
        ("eval", eval_sources(data)),
    )
    for split, sources in splits:
        for source in sources:
            task = make_task(source, seed=0)
            _check_files(f"data.{split}", source)
            if source.path is not None and Path(source.path).stat().st_size <= _READ_BYTES:
                task.items(split)
    for part in reward_parts(data):
        _check_reward(part)


def _check_reward(part: RewardPart) -> None:
    if part.config.function is not None:
        import_function(f"{part.key}.function", part.config.function)
    if part.config.task is not None:
        make_task(task_source(part), seed=0)
    if part.config.model is not None:
        check_model_folder(
            f"{part.key}.model",
            part.config.model,
            else_expected="a model folder or a hub name (org/name)",
            files="a sequence classification model",
        )


def _check_files(key: str, source: ConfiguredSource) -> None:
    paths = [source.path, source.few_shot.path if source.few_shot is not None else None]
    for path in paths:
        if path is not None and not Path(path).is_file():
            raise DataError(f"{key}: {path}: no such file")
