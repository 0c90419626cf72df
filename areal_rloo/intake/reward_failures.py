"""Completions without a reward: each drops its sample; too many end the run with the error of the first.

If most workers fail, the rewards are to blame. If only a few fail, they are to blame (their hosts, say, or they lie):
they do not end the run, and get no leases for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from areal_rloo.config import Config
from areal_rloo.errors import RewardError, UserError
from areal_rloo.intake.worker import LAST_OUTCOMES, Standing
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)


class _Outcomes:
    """Which of the last completions of all workers failed, and how many: a batch of them is not counted anew."""

    def __init__(self, number: int) -> None:
        self._failed: deque[bool] = deque(maxlen=number)
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._failed)

    def append(self, failed: bool) -> None:
        self.num_failed += failed - (self._failed[0] if len(self._failed) == self._failed.maxlen else False)
        self._failed.append(failed)


class RewardFailures:
    """The share of failures among the last completions: of a batch of all workers, and of each worker's own."""

    def __init__(self, config: Config) -> None:
        self._outcomes = _Outcomes(max(LAST_OUTCOMES, config.samples_per_step))
        self._most_share = config.rollout.max_reward_failure_share
        self._rollout = config.rollout
        self._first: RewardError | None = None

    def scored(self, standing: Standing | None) -> None:
        """Record a completion with a reward; `standing` is None if the worker is taken for dead."""
        self._outcomes.append(False)
        if standing is not None:
            standing.failed.append(False)
            if standing.num_set_aside and len(standing.failed) == LAST_OUTCOMES and not any(standing.failed):
                standing.num_set_aside = 0

    def failed(self, standing: Standing | None, error: RewardError, votes: Iterable[Collection[bool]]) -> None:
        """Record a completion without a reward.

        Args:
            votes: of the workers: which of their last completions failed.

        Raises:
            UserError: too many failed, and at most of the workers; says how many, and why the first did.
        """
        if standing is not None:
            standing.failed.append(True)
        if error.reason == "reward_unavailable":
            return  # this worker has no reward processes, which says nothing about the rewards
        self._first = self._first or error
        self._outcomes.append(True)
        if len(self._outcomes) < LAST_OUTCOMES or not self._too_many_of_all or not self._by_most(votes):
            return
        logger.error("the first completion without a reward: %s", self._first)
        num_failed = self._outcomes.num_failed
        place = " (its traceback is in logs/learner.log)" if self._first.has_traceback else ""
        raise UserError(
            f"{self._blamed(self._first.reason)}: {num_failed} of the last {len(self._outcomes)} completions got no "
            f"reward, more than rollout.max_reward_failure_share={self._most_share:g}; the first: "
            f"{self._first.reason}: {self._first.summary}{place}"
        )

    def blame(self, standing: Standing, votes: Iterable[Collection[bool]]) -> str | None:
        """Return why a worker is to blame: too many completions failed, and its own, but not those of most workers.

        A prompt whose reward always fails fills a worker's own completions with failures, but not those of all.
        """
        own = standing.failed
        if len(own) < LAST_OUTCOMES or not self._too_many_of_all or not self._too_many(own):
            return None
        if self._by_most(votes):
            return None
        return f"{sum(own)} of the last {len(own)} completions got no reward, and those of most workers did"

    def _blamed(self, reason: str) -> str:
        """Give the key of the code that failed for this reason, and the value if it is an engine or an episode."""
        if reason.startswith("reward_"):
            return "rewards"
        if reason.startswith("generation_"):
            return f"rollout.engine={self._rollout.engine}"
        episode = self._rollout.episode  # of the user, perhaps, and then with any reason
        return f"rollout.episode.agent={episode.agent}" if episode.agent else f"rollout.episode.type={episode.type}"

    def _by_most(self, votes: Iterable[Collection[bool]]) -> bool:
        """Return True if most of the workers fail too often."""
        fails = [self._too_many(failed) for failed in votes]
        return 2 * sum(fails) > len(fails)

    @property
    def _too_many_of_all(self) -> bool:
        return self._outcomes.num_failed > self._most_share * len(self._outcomes)

    def _too_many(self, failed: Collection[bool]) -> bool:
        return sum(failed) > self._most_share * len(failed)
