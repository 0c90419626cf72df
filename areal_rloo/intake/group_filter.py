"""Refuse complete groups not worth training on, by `min_reward_std` and by the user's `group_filter`.

Called on the intake's loop.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from areal_rloo.config import Config, import_function
from areal_rloo.errors import UserError, defined_at, raised, shown
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Group

logger = get_logger(__name__)

_KEY = "algorithm.group_filter"


class Filter:
    """Decides on groups, and ends a run in which all groups are refused."""

    def __init__(self, config: Config, group_filter: Callable[[Group], bool] | None) -> None:
        self._least_std, self._group_filter = config.algorithm.min_reward_std, group_filter
        self._groups_per_step = config.learner.groups_per_step
        self._most_batches = config.algorithm.max_filtered_batches
        self._num_refused = self._num_errors = 0  # since the last batch, and in a row
        self._error: BaseException | None = None

    def refusal(self, group: Group) -> str | None:
        """Give the reason to drop a group; None for a group to keep."""
        reason = self._reason(group)
        self._num_refused += reason is not None
        return reason

    def check(self, *, has_batch: bool) -> None:
        """Look at the limits, after a group was dropped. `has_batch`: a whole batch waits, so nothing is missing.

        Raises:
            UserError: `group_filter` raised for `groups_per_step` groups in a row; or the groups of
                `max_filtered_batches` batches were refused since the last batch.
        """
        if self._num_errors >= self._groups_per_step:
            assert self._error is not None, "an error was counted"
            raise UserError(f"{_KEY}: {raised(self._error)}") from self._error
        if has_batch:
            self._num_refused = 0
        if 0 < self._most_batches * self._groups_per_step <= self._num_refused:
            key = f"algorithm.min_reward_std={self._least_std:g}" if self._group_filter is None else _KEY
            raise UserError(
                f"{key}: {self._num_refused} groups were refused since the last batch, which reaches "
                f"algorithm.max_filtered_batches={self._most_batches}; look at the rewards in trajectories.jsonl: take "
                "easier or harder prompts, or a weaker filter; max_filtered_batches=0 is no limit"
            )

    def batch_taken(self) -> None:
        """Begin to count the refused groups anew."""
        self._num_refused = 0

    def _reason(self, group: Group) -> str | None:
        rewards = [sample.reward for sample in group.samples]
        if self._least_std > 0 and statistics.pstdev(rewards) < self._least_std:
            return "low_reward_std"
        try:
            keep = self._group_filter is None or bool(self._group_filter(group))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # A single bad group must not end the run; a filter with constant errors would starve the learner.
            self._num_errors, self._error = self._num_errors + 1, error
            logger.exception("algorithm.group_filter raised on group %d: the group is dropped", group.group_id)
            return "group_filter_error"
        self._num_errors = 0
        return None if keep else "group_filter"


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
