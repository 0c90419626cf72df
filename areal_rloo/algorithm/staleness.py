"""The staleness bound, as integers (DESIGN: version v, max_staleness eta, groups_per_step B).

`Admission` decides how many groups may start; `must_wait` decides whether a batch may be consumed under the policy
`wait`; `within_bound` says which tokens may have a gradient. ARCHITECTURE.md proves what they give together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def num_admissible(
    *, policy_version: int, max_staleness: int, groups_per_step: int, admitted: int, dropped: int
) -> int:
    """How many more groups may be leased now: those that keep admitted - dropped at most (v + eta + 1) B."""
    return max(0, (policy_version + max_staleness + 1) * groups_per_step - (admitted - dropped))


def deadline(*, admission_version: int, max_staleness: int) -> int:
    """The last learner version at which a group admitted at `admission_version` has no token past the bound.

    Its lease forbids weights older than the admission version, so every token has staleness at most
    deadline - admission_version = eta when it is trained on at the deadline or before.
    """
    return admission_version + max_staleness


def within_bound(versions: npt.NDArray[np.int32], *, policy_version: int, max_staleness: int) -> npt.NDArray[np.bool_]:
    """True where a token may have a gradient at this learner version; shape as `versions`."""
    result: npt.NDArray[np.bool_] = policy_version - versions <= max_staleness
    return result


def must_wait(*, policy_version: int, groups_per_step: int, deadlines_left: Sequence[int]) -> bool:
    """True if consuming a batch now would leave a group that cannot be trained by its deadline.

    After the step at version v, the groups with deadline at most d have to fit into the d - v steps that come before
    version d + 1: earliest-deadline-first scheduling is feasible if and only if that holds for every d.

    Args:
        policy_version: v, the version whose step is about to consume a batch.
        groups_per_step: B.
        deadlines_left: the deadlines of every admitted group that would stay behind, in flight or complete.
    """
    for num_due, due in enumerate(sorted(deadlines_left), start=1):
        if num_due > max(0, due - policy_version) * groups_per_step:
            return True
    return False
