"""Fit the live groups of a checkpoint to the options of a resume, before the intake begins.

In: the restored ledger, the config that wrote the checkpoint, and the config of the resume. Out: a ledger in which the
statements of ARCHITECTURE.md about the staleness bound hold as if the run had always had the present options, and
every trajectory fits into a row. Each group is kept or dropped whole.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_rloo.algorithm.staleness import deadline
from areal_rloo.config import Config
from areal_rloo.intake.ledger import Ledger, LedgerGroup
from areal_rloo.trajectory import longest_row

REASON = "options_changed"


def refit(
    ledger: Ledger, *, before: Config, now: Config, policy_version: int, give_back: Callable[[int, int], None]
) -> int:
    """Drop the groups that the next steps cannot train within the bound, or not in a row; return their number.

    If an option of the bound has changed, every group gets the deadline of the present eta. Then, with the present B,
    the groups with a deadline of at most d must fit into the steps up to version d. `give_back` takes epoch and item
    index of each dropped group's prompt: the prompt is leased again. The other groups keep their samples, and so their
    size.
    """
    algorithm, learner = now.algorithm, now.learner
    same_bound = _deciding(before) == _deciding(now) and before.learner.num_train_steps <= learner.num_train_steps
    if not same_bound:
        for group in ledger.groups.values():
            due = deadline(admission_version=group.admission_version, max_staleness=algorithm.max_staleness)
            ledger.set_deadline(group, due)
    num_kept = num_dropped = 0
    for group in sorted(ledger.groups.values(), key=_order):
        num_steps = min(group.deadline, learner.num_train_steps - 1) - policy_version + 1
        in_time = len(group.samples) >= algorithm.least_group and num_kept < num_steps * learner.groups_per_step
        longest = max((longest_row(sample.trajectories) for sample in group.samples.values()), default=0)
        if longest <= learner.microbatch_tokens and (same_bound or in_time):
            num_kept += 1
            continue
        ledger.drop_group(group.group_id, REASON)
        give_back(group.prompt.epoch, group.prompt.item_index)
        num_dropped += 1
    return num_dropped


def _order(group: LedgerGroup) -> tuple[int, int, int]:
    """Return the deadline, the number of samples without trajectories, and the id."""
    return group.deadline, group.num_missing, group.group_id


def _deciding(config: Config) -> tuple[object, ...]:
    algorithm = config.algorithm
    return config.learner.groups_per_step, algorithm.max_staleness, algorithm.stale_tokens, algorithm.least_group
