"""Completions without a reward: each drops its sample; too many end the run with the traceback of the first."""

from __future__ import annotations

from collections import deque

from areal_rloo.config import Config
from areal_rloo.errors import RewardError, UserError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_LEAST = 20  # completions; a share of fewer says nothing


class RewardFailures:
    """The share of failures among the last completions; the window is a batch long."""

    def __init__(self, config: Config) -> None:
        self._failed: deque[bool] = deque(maxlen=max(_LEAST, config.samples_per_step))
        self._most_share = config.rollout.max_reward_failure_share
        self._first: RewardError | None = None

    def scored(self, num: int) -> None:
        """Record completions with a reward."""
        self._failed.extend([False] * num)

    def failed(self, error: RewardError) -> None:
        """Record a completion without a reward. A worker without reward processes says nothing about the rewards.

        Raises:
            UserError: too many failed; says how many, and why the first did.
        """
        if error.reason == "reward_unavailable":
            return
        self._first = self._first or error
        self._failed.append(True)
        num_failed = sum(self._failed)
        if len(self._failed) < _LEAST or num_failed <= self._most_share * len(self._failed):
            return
        logger.error("the first completion without a reward: %s", self._first)
        raise UserError(
            f"rewards: {num_failed} of the last {len(self._failed)} completions got none, more than "
            f"rollout.max_reward_failure_share={self._most_share:g}; the first: {self._first.reason}: "
            f"{self._first.summary} (its traceback is in logs/learner.log)"
        )
