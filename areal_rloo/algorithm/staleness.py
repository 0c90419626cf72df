"""The staleness bound in integers: learner version v, published version p, `max_staleness` eta, `groups_per_step` B.

`num_admissible` limits how many groups may start. `deadline` says how long a group stays within the bound. `must_wait`
decides whether a batch may be consumed with `stale_tokens: wait`. `within_bound` says which tokens may have a gradient.
ARCHITECTURE.md proves the guarantees of all four together. The intake uses this module, so torch and numpy are not
imported at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def num_admissible(
    *,
    policy_version: int,
    published_version: int,
    max_staleness: int,
    pipeline_depth: int,
    groups_per_step: int,
    num_train_steps: int,
    num_live: int,
) -> int:
    """Count the groups that may be leased now and keep the live groups to those of the next steps, p + eta at most.

    Live groups are admitted, and neither trained nor dropped. No group is admitted for a step after the last. A smaller
    depth keeps tokens fresher, and late samples within the bound.
    """
    num_left = min(published_version + max_staleness + 1, num_train_steps) - policy_version
    return max(0, min(num_left, pipeline_depth + 1) * groups_per_step - num_live)


def deadline(*, admission_version: int, max_staleness: int) -> int:
    """Return the last learner version at which a group admitted at published version p has no token past the bound.

    The lease forbids weights older than this admission version. So every token that is trained on by the deadline has
    staleness at most deadline - admission_version = eta.
    """
    return admission_version + max_staleness


def within_bound(versions: npt.NDArray[np.int32], *, policy_version: int, max_staleness: int) -> npt.NDArray[np.bool_]:
    """Return True where a token may have a gradient at this learner version; same shape as `versions`."""
    result: npt.NDArray[np.bool_] = policy_version - versions <= max_staleness
    return result


def must_wait(*, policy_version: int, groups_per_step: int, num_left: Mapping[int, int]) -> bool:
    """Return True if consuming a batch now would leave a group that cannot be trained by the group's deadline.

    After the step at version v, the groups with deadline at most d must fit into the d - v steps before version d + 1.
    Earliest-deadline-first scheduling is feasible if and only if this holds for every d. `num_left` has the number of
    admitted groups with each deadline that would stay behind, in flight or complete.
    """
    num_due = 0
    for due in sorted(num_left):
        num_due += num_left[due]
        if num_due > max(0, due - policy_version) * groups_per_step:
            return True
    return False
