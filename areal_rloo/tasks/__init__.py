"""Prompts and what completions of them are worth: the tasks, and how the data section of a config becomes items."""

from areal_rloo.tasks.base import Item, Message, Split, Task
from areal_rloo.tasks.checks import check_data
from areal_rloo.tasks.loading import Source, eval_sources, load_eval, load_train
from areal_rloo.tasks.registry import make_task
from areal_rloo.tasks.scorer import PartKey, RewardPart, make_scorer, reward_parts, scorer_argument

__all__ = [
    "Item",
    "Message",
    "PartKey",
    "RewardPart",
    "Source",
    "Split",
    "Task",
    "check_data",
    "eval_sources",
    "load_eval",
    "load_train",
    "make_scorer",
    "make_task",
    "reward_parts",
    "scorer_argument",
]
