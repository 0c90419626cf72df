"""From complete groups in the ledger to the batch of a train step: earliest deadline first, within the bound.

`take` returns a batch, or None while the train step must wait. A group whose tokens are all past the bound is dropped,
and the prompt goes back to the stream. `stale_tokens: drop` also drops late samples, and the group if too few are left.
A group not worth training on (`min_reward_std`, `group_filter`) is dropped when complete; another prompt takes the
place.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from areal_rloo.algorithm.staleness import must_wait, within_bound
from areal_rloo.config import Config
from areal_rloo.intake.group_filter import Filter
from areal_rloo.intake.ledger import Ledger, LedgerGroup
from areal_rloo.intake.queues import GroupQueue
from areal_rloo.telemetry import trace
from areal_rloo.trajectory import Group

_FREED = 1.25  # samples for each new one: all of a step by the next, if as many arrive


class Buffer:
    """Chooses batches from the ledger, and remembers which groups are being trained on."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        config: Config,
        give_back: Callable[[int, int], None],
        group_filter: Callable[[Group], bool] | None = None,
        note: Callable[[Group], None] | None = None,
    ) -> None:
        self._ledger = ledger
        self._algorithm = config.algorithm
        self._groups_per_step = config.learner.groups_per_step
        self._give_back = give_back  # called with epoch and item index of a prompt to lease again
        filters = group_filter is not None or self._algorithm.min_reward_std > 0
        self._filter = Filter(config, group_filter) if filters else None
        self._note = note  # called with every complete group, also if the group is not worth training on
        self._taken: list[int] = []  # groups in training
        self._trained: list[LedgerGroup] = []  # not yet freed
        self._num_to_free = 0.0  # groups
        self._ready = GroupQueue()  # complete groups, with something fresh at this version
        self._policy_version = 0
        self._new = [group for group in ledger.groups.values() if group.complete]  # not yet compared with the version

    @property
    def num_ready(self) -> int:
        """Number of complete groups that wait for a train step."""
        return len(self._ready) + len(self._new)

    def settle(self, group: LedgerGroup) -> None:
        """Drop a complete group that is too small for a baseline, or not worth training on; else keep the group ready.

        Raises:
            UserError: too many groups were not worth training on.
        """
        if not group.complete:
            return
        if len(group.samples) < self._algorithm.least_group:
            self._ledger.drop_group(group.group_id, "group_too_small")
            return
        if self._note is not None:
            self._note(group.group)
        if self._filter is None or (reason := self._filter.refusal(group.group)) is None:
            self._new.append(group)
        else:
            self._ledger.drop_group(group.group_id, reason)
            self._filter.check(has_batch=self.num_ready >= self._groups_per_step)

    def take(self, policy_version: int, *, is_last: Callable[[], bool]) -> list[Group] | None:
        """Take the batch for the step at this version; None while the batch is not complete.

        `is_last`: if no other group can come, a smaller batch will do. Asked once stale groups gave their prompts back.
        """
        self._keep_ready(policy_version)
        wanted = self._groups_per_step
        if is_last() and len(self._ready) == len(self._ledger.groups):
            wanted = min(wanted, len(self._ready))
        if wanted == 0 or len(self._ready) < wanted:
            return None
        if self._algorithm.stale_tokens == "wait" and must_wait(
            policy_version=policy_version, groups_per_step=self._groups_per_step, num_left=self._num_left(wanted)
        ):
            return None
        if self._filter is not None:
            self._filter.batch_taken()
        taken = [self._ready.pop() for _ in range(wanted)]
        self._taken = sorted(group.group_id for group in taken)  # the batch must not depend on the order of arrival
        trace.record("intake", "taken", groups=list(self._taken), step=policy_version + 1)
        return [self._ledger.begin_training(group_id) for group_id in self._taken]

    def upcoming(self, policy_version: int) -> list[Group] | None:
        """Return the batch of this later version if no earlier group is complete by then; None if not known."""
        num_ready = len(self._ready) + len(self._new)
        deadlines = [*(group.deadline for group in self._new), *([self._ready.first.deadline] if self._ready else [])]
        if num_ready < self._groups_per_step or min(deadlines) < policy_version:  # some of it may be stale then
            return None  # without a look at all groups: the learner asks 20 times a second
        first = self._ready.first_of(self._new, self._groups_per_step)
        return [group.group for group in sorted(first, key=lambda group: group.group_id)]

    def trained(self) -> None:
        """Count the batch taken last as trained."""
        self._trained = [self._ledger.train_group(group_id) for group_id in self._taken]
        self._taken.clear()

    def free(self, num_arrived: int) -> None:
        """Free some trained groups, for this many samples: all of a step at once would take 20 ms of the loop."""
        self._num_to_free += _FREED * num_arrived / self._algorithm.group_size
        num_groups, self._num_to_free = divmod(self._num_to_free, 1)
        del self._trained[max(0, len(self._trained) - int(num_groups)) :]

    def refused(self, reason: str) -> None:
        """Drop the batch taken last."""
        while self._taken:
            self._ledger.drop_group(self._taken.pop(), reason, in_training=True)

    def _keep_ready(self, policy_version: int) -> None:
        """Drop what is past the bound: of each group once for every version from the deadline on."""
        if policy_version != self._policy_version:
            self._policy_version = policy_version
            while self._ready and self._ready.first.deadline < policy_version:
                self._new.append(self._ready.pop())
        for group in sorted(self._new, key=lambda group: (group.deadline, group.group_id)):
            if group.deadline >= policy_version or self._keeps_fresh(group, policy_version):
                self._ready.push(group)
        self._new.clear()

    def _num_left(self, num_taken: int) -> Counter[int]:
        """Count the live groups by deadline, without the first ready ones."""
        left = Counter(self._ledger.num_due)
        for due in sorted(self._ready.num_due):
            taken = min(num_taken, self._ready.num_due[due])
            left[due] -= taken
            num_taken -= taken
        return left

    def _keeps_fresh(self, group: LedgerGroup, policy_version: int) -> bool:
        """Drop late samples under `stale_tokens: drop`; drop a group with too few samples or without a fresh token.

        Returns False if the group is dropped.
        """
        within = functools.partial(
            within_bound, policy_version=policy_version, max_staleness=self._algorithm.max_staleness
        )
        has_fresh_token = False
        for index, sample in list(group.samples.items()):
            fresh = [within(trajectory.completion.versions) for trajectory in sample.trajectories]
            has_fresh_token |= any(tokens.any() for tokens in fresh)
            if self._algorithm.stale_tokens == "drop" and not all(tokens.all() for tokens in fresh):
                self._ledger.drop_sample((group.group_id, index), "stale")
        if has_fresh_token and len(group.samples) >= self._algorithm.least_group:
            return True
        self._ledger.drop_group(group.group_id, "stale")
        self._give_back(group.prompt.epoch, group.prompt.item_index)
        return False
