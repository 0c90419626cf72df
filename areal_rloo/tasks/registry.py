"""The task a source names: a built-in one, or a class of the user's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from areal_rloo.config import ConfiguredSource, import_function
from areal_rloo.errors import DataError
from areal_rloo.tasks.arithmetic import ArithmeticTask
from areal_rloo.tasks.base import Task
from areal_rloo.tasks.gsm8k import Gsm8kTask
from areal_rloo.tasks.math import MathTask
from areal_rloo.tasks.reasoning_gym import ReasoningGymTask
from areal_rloo.tasks.rows_task import RowsTask
from areal_rloo.tasks.svamp import SvampTask

TASKS: Mapping[str, Callable[[ConfiguredSource, int], Task]] = {
    "arithmetic": ArithmeticTask,
    "gsm8k": Gsm8kTask,
    "math": MathTask,
    "reasoning_gym": ReasoningGymTask,
    "rows": RowsTask,
    "svamp": SvampTask,
}


def make_task(source: ConfiguredSource, *, seed: int) -> Task:
    """The task a source names.

    Raises:
        DataError: there is no task of that name, or it refuses its source.
        ConfigError: it is an import path, and cannot be imported.
    """
    if ":" in source.task:
        task = import_function("data: task", source.task)(source, seed)
        if not isinstance(task, Task):
            raise DataError(
                f"data: task: expected {source.task} to be a subclass of areal_rloo.tasks.Task, got "
                f"{type(task).__name__}"
            )
        return task
    if source.task not in TASKS:
        close = difflib.get_close_matches(source.task, TASKS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(TASKS)}, or file.py:Class"
        raise DataError(f"data: unknown task '{source.task}'; {hint}")
    return TASKS[source.task](source, seed)
