"""Prompts, and the answers and tools that belong to them. Imports without torch.

- `base`: the interface of a task, lazy items, and checks of a source.
- `arithmetic`, `math`, `reasoning_gym`, `word_problems` (GSM8K and SVAMP): the built-in tasks.
- `code`: the task of programs, run against tests.
- `rows`: reads rows from files and from the hub; the task of your own rows. `demonstrations`: of rows to imitate.
- `loading`: finds the task of a source, loads the sources of a split, and checks the data before a run starts.
- `sendable`: checks that rollout workers can read rows and items.
- `answers`: reads final answers, and compares numbers.
- `chat`: encodes messages as token ids.
- `tools`: the tools of the policy, a calculator and a sandboxed Python.
"""

from areal_rloo.tasks.base import Item, Message, Split, Task
from areal_rloo.tasks.loading import (
    Looked,
    Source,
    check_data,
    check_same_sources,
    hub_datasets,
    load_eval,
    load_train,
    make_task,
)

__all__ = [
    "Item",
    "Looked",
    "Message",
    "Source",
    "Split",
    "Task",
    "check_data",
    "check_same_sources",
    "hub_datasets",
    "load_eval",
    "load_train",
    "make_task",
]
