"""areal_rloo: asynchronous, decoupled actor-learner RL post-training of language models.

Beside the packages: `__main__` is the command `areal-rloo`, `completion` completes it in a shell, and `program` begins
and ends every program; `trajectory` and `errors` are the nouns and the exception tree; `decoding` reads JSON and
msgpack from outside; `files` writes atomically, locks, and makes scratch folders; `ports` reserves ports; `waiting`
waits for conditions; `loop_thread` runs an event loop on a thread; `turns` lets learner and engines compute in turns;
`parent_death` ends processes whose parent died; `session_leader` kills a process with its session; `keeper` ends
everything started by a process; `standard_streams` opens closed standard streams; `container_limits` are memory, cores
and processes of the container; `exports` imports the public names of a package on first use.

docs/library.md uses the packages from a program of the user's own.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from areal_rloo.exports import exports_of

if TYPE_CHECKING:
    from areal_rloo.config import Config, load_config
    from areal_rloo.errors import ArealRlooError, UserError
    from areal_rloo.trajectory import Completion, Group, Item, Message, Trajectory

__all__ = [
    "ArealRlooError",
    "Completion",
    "Config",
    "Group",
    "Item",
    "Message",
    "Trajectory",
    "UserError",
    "__version__",
    "load_config",
]
__version__ = "0.1.0"
__getattr__ = exports_of(__name__)

if sys.argv[:1] == ["-m"] and find_spec("msgspec") is None:  # `python -m areal_rloo...` with another Python
    print(  # noqa: T201 - nothing of the package can be imported
        f"error: {sys.executable} lacks the packages of areal_rloo; use .venv/bin/python, which `make quickstart` "
        "makes, or install the package with this Python (README.md)",
        file=sys.stderr,
    )
    raise SystemExit(2)
