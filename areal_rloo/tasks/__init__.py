"""The tasks by name, and how the data section of a config becomes items.

A file task whose evaluation has no path of its own takes the `test` file beside the train file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import DataConfig, SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.rewards.pool import RewardRequest
from areal_rloo.tasks.arithmetic import ArithmeticTask
from areal_rloo.tasks.base import Item, Split, Task
from areal_rloo.tasks.gsm8k import Gsm8kTask
from areal_rloo.tasks.math import MathTask
from areal_rloo.tasks.svamp import SvampTask

__all__ = ["Item", "ScorerSettings", "Split", "Task", "check_data", "load_items", "make_scorer", "make_task"]


class ScorerSettings(msgspec.Struct, frozen=True):
    """What a worker process has to know to score for a run."""

    data: DataConfig
    seed: int


def make_scorer(argument: bytes) -> Callable[[RewardRequest], float]:
    """The scorer of a reward pool: the reward of the train or the evaluation task.

    Args:
        argument: `ScorerSettings` as msgpack.
    """
    settings = msgspec.msgpack.decode(argument, type=ScorerSettings)
    tasks = {"train": make_task(settings.data.train, seed=settings.seed)}
    if settings.data.eval is not None:
        tasks["eval"] = make_task(settings.data.eval, seed=settings.seed)
    return lambda request: tasks[request.purpose].reward(request.completion, request.answer)


_TASKS: dict[str, Callable[[SourceConfig, int], Task]] = {
    "arithmetic": lambda source, seed: ArithmeticTask(seed),
    "gsm8k": lambda source, seed: Gsm8kTask(source),
    "math": lambda source, seed: MathTask(source),
    "svamp": lambda source, seed: SvampTask(source),
}


def make_task(source: SourceConfig, *, seed: int) -> Task:
    """The task a source names.

    Raises:
        DataError: there is no task of that name.
    """
    if source.task not in _TASKS:
        close = difflib.get_close_matches(source.task, _TASKS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(_TASKS)}"
        raise DataError(f"data: unknown task '{source.task}'; {hint}")
    return _TASKS[source.task](source, seed)


def load_items(data: DataConfig, split: Split, *, seed: int) -> Sequence[Item]:
    """The items of a split, cut to its `num_prompts`; none for an evaluation that is switched off.

    Raises:
        DataError: the data cannot be read.
    """
    source = data.train if split == "train" else _eval_source(data)
    if source is None:
        return ()
    items = make_task(source, seed=seed).items(split)
    return items if source.num_prompts is None else items[: source.num_prompts]


def check_data(data: DataConfig) -> None:
    """The quick check before anything starts: tasks are known, files are there and can be read.

    Raises:
        DataError: as `load_items`, where it can be told without loading everything.
    """
    for source in (data.train, _eval_source(data)):
        if source is not None:
            make_task(source, seed=0)
            if source.path is not None and not Path(source.path).is_file():
                raise DataError(f"data: {source.path}: no such file")


def _eval_source(data: DataConfig) -> SourceConfig | None:
    source, train = data.eval, data.train
    if source is None or source.path is not None or source.task != train.task or train.path is None:
        return source
    path = Path(train.path)
    sibling = path.with_name("test" + path.suffix)
    if not sibling.is_file():
        raise DataError(
            f"data.eval.path: null, and there is no {sibling}; set it, or switch it off with data.eval=null"
        )
    return msgspec.structs.replace(source, path=str(sibling), fields=source.fields or train.fields)
