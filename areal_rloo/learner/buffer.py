"""From complete groups in the ledger to the batch of a train step: earliest deadline first, within the bound.

The train step asks with its version; the answer is a batch, or None while it has to wait. What is past saving under
`stale_tokens: drop` is dropped here, and its prompt goes back to the stream. A group that is not worth training on
(`min_reward_std`, `group_filter`) is dropped when it completes; its place goes to another prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from areal_rloo.algorithm.staleness import must_wait, within_bound
from areal_rloo.config import AlgorithmConfig
from areal_rloo.learner.ledger import Ledger, LedgerGroup
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Group

logger = get_logger(__name__)


class Buffer:
    """Chooses batches from the ledger; keeps nothing of its own but which groups are out for training."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        algorithm: AlgorithmConfig,
        groups_per_step: int,
        give_back: Callable[[int, int], None],
        group_filter: Callable[[Group], bool] | None = None,
    ) -> None:
        """
        Args:
            ledger: where groups come from.
            algorithm: group size, staleness, and what is worth training on.
            groups_per_step: groups of a batch.
            give_back: called with epoch and item index of a prompt that is to be leased again.
            group_filter: false for a group to drop; the user's code, called on the intake's thread.
        """
        self._ledger = ledger
        self._algorithm = algorithm
        self._groups_per_step = groups_per_step
        self._give_back = give_back
        self._group_filter = group_filter
        self._filter_errors_in_a_row = 0
        self._taken: set[int] = set()
        self._min_group = 2 if algorithm.drop_groups_of_one and algorithm.group_size > 1 else 1

    def settle(self, group: LedgerGroup) -> None:
        """Drop a complete group that is too small to be compared with anything, or not worth training on.

        Raises:
            Exception: what `group_filter` raised, once it has for `groups_per_step` groups in a row.
        """
        if not group.complete:
            return
        if len(group.samples) < self._min_group:
            self._ledger.drop_group(group.group_id, "group_too_small")
            return
        rewards = [sample.reward for sample in group.group.samples]
        if self._algorithm.min_reward_std > 0 and statistics.pstdev(rewards) < self._algorithm.min_reward_std:
            self._ledger.drop_group(group.group_id, "low_reward_std")
        elif self._group_filter is not None:
            self._filter(group, self._group_filter)

    def num_ready(self) -> int:
        """Complete groups that wait to be trained on."""
        return len(self._ready())

    def take(self, policy_version: int, *, last: bool) -> list[Group] | None:
        """The batch for the step at this version, or None while it is not to be had.

        Args:
            policy_version: the learner's version now.
            last: no further group will ever be admitted: a smaller batch is better than none.
        """
        if self._algorithm.stale_tokens == "drop":
            for group in self._ready():
                self._drop_stale(group, policy_version)
        ready = self._ready()
        wanted = self._groups_per_step
        if last and len(ready) == len(self._ledger.groups):
            wanted = min(wanted, len(ready))
        if wanted == 0 or len(ready) < wanted:
            return None
        chosen = ready[:wanted]
        if self._algorithm.stale_tokens == "wait":
            left = self._ledger.groups.keys() - {group.group_id for group in chosen}
            deadlines = [self._ledger.groups[group_id].deadline for group_id in left]
            if must_wait(
                policy_version=policy_version, groups_per_step=self._groups_per_step, deadlines_left=deadlines
            ):
                return None
        self._taken = {group.group_id for group in chosen}
        # By group id, so that a batch does not depend on the order of arrival.
        return [group.group for group in sorted(chosen, key=lambda g: g.group_id)]

    def trained(self) -> None:
        """The batch taken last was trained on."""
        for group_id in self._taken:
            self._ledger.train_group(group_id)
        self._taken = set()

    def refused(self, reason: str) -> None:
        """The batch taken last could not be trained on: it is dropped."""
        for group_id in self._taken:
            self._ledger.drop_group(group_id, reason)
        self._taken = set()

    def _filter(self, group: LedgerGroup, group_filter: Callable[[Group], bool]) -> None:
        try:
            keep = bool(group_filter(group.group))
        except Exception:
            # One bad group must not end the run, but a filter that never works would let it starve.
            self._filter_errors_in_a_row += 1
            logger.exception("algorithm.group_filter raised on group %d: the group is dropped", group.group_id)
            self._ledger.drop_group(group.group_id, "group_filter_error")
            if self._filter_errors_in_a_row >= self._groups_per_step:
                raise
            return
        self._filter_errors_in_a_row = 0
        if not keep:
            self._ledger.drop_group(group.group_id, "group_filter")

    def _ready(self) -> list[LedgerGroup]:
        ready = [g for g in self._ledger.groups.values() if g.complete and g.group_id not in self._taken]
        return sorted(ready, key=lambda group: (group.deadline, group.group_id))

    def _drop_stale(self, group: LedgerGroup, policy_version: int) -> None:
        for trajectory in group.group.trajectories:
            versions = trajectory.completion.versions
            fresh = within_bound(versions, policy_version=policy_version, max_staleness=self._algorithm.max_staleness)
            if not fresh.all():  # the rest of its sample goes with it
                self._ledger.drop_sample(trajectory.sample_id, "stale")
        if len(group.samples) < self._min_group:
            self._ledger.drop_group(group.group_id, "stale")
            self._give_back(group.prompt.epoch, group.prompt.item_index)
