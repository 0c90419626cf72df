"""Make the group filter of a config: the user's function, with a check of the results. Called on the intake's loop."""

from __future__ import annotations

from collections.abc import Callable

from areal_rloo.config import import_function
from areal_rloo.errors import UserError, defined_at, shown
from areal_rloo.trajectory import Group

_KEY = "algorithm.group_filter"


def load_group_filter(path: str | None) -> Callable[[Group], bool] | None:
    """Import the filter of `algorithm.group_filter`; None if there is no filter.

    The filter raises a UserError if the result is neither True nor False. A forgotten `return` gives None, which would
    drop every group.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if path is None:
        return None
    function = import_function(_KEY, path)

    def keeps(group: Group) -> bool:
        kept = function(group)
        if kept not in (True, False):  # True for the bools of any library, too
            raise UserError(f"{path} returned {shown(kept)}, expected True or False{defined_at(function)}")
        return bool(kept)

    return keeps
