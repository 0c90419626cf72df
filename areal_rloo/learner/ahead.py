"""Prepares the next batch while the ranks train on this one: masks, advantages, packing and encoding.

Else all GPUs of the learner wait for rank 0 between two steps: for 40 ms a million tokens (docs/scaling.md). Nothing is
taken from the intake ahead, so ledger, admission and checkpoints know of no second batch. A thread prepares the batch
of the next version as far as known. If exactly this batch comes, for this version, the step uses the preparation;
otherwise, the training thread prepares the batch. So a step is the same to the bit.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from areal_rloo.learner.train_step import Prepared, StepResult, TrainStep
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trace import span
from areal_rloo.trajectory import Group, Trajectory

logger = get_logger(__name__)

_LOOK_EVERY_S = 0.05
_TRACK = "preparation"  # of the trace


class Ahead:
    """Runs train steps, and prepares the next one meanwhile. Use it on the training thread."""

    def __init__(self, train_step: TrainStep, upcoming: Callable[[int], Sequence[Group] | None]) -> None:
        """`upcoming`, safe on any thread: returns the probable batch of a version; None if unknown."""
        self._train_step, self._upcoming = train_step, upcoming
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_TRACK)
        self._over = threading.Event()  # of the step now
        self._next: Future[Prepared | None] | None = None

    def step(self, groups: Sequence[Group], *, policy_version: int, last: bool) -> StepResult:
        """Train once on a batch at this version; `last`: no step follows."""
        started_s = time.perf_counter()
        prepared = self._prepared(groups, policy_version)
        if prepared is None:
            prepared = self._train_step.prepare(groups, policy_version=policy_version)
        if self._train_step.can_prepare_ahead and not last:
            self._over = threading.Event()
            self._next = self._thread.submit(self._prepare, policy_version + 1, self._over)
        try:
            return self._train_step.train(prepared, started_s=started_s)
        finally:
            self._over.set()

    def close(self) -> None:
        """End the thread after the present work."""
        self._over.set()
        self._thread.shutdown()

    def _prepared(self, groups: Sequence[Group], policy_version: int) -> Prepared | None:
        """Return the preparation of exactly this step, or None."""
        ahead, self._next = self._next, None
        if ahead is None:
            return None
        if (error := ahead.exception()) is not None:  # if this batch is why, the training thread fails likewise
            logger.warning("version %d was not prepared ahead: %r", policy_version, error, exc_info=error)
            return None
        prepared = ahead.result()
        if prepared is None or prepared.policy_version != policy_version:  # a skipped step repeats the version
            return None
        return prepared if _are_same(prepared.samples.trajectories, groups) else None

    def _prepare(self, policy_version: int, over: threading.Event) -> Prepared | None:
        """Wait for the batch until this step is over, and prepare it."""
        while (groups := self._upcoming(policy_version)) is None:
            if over.wait(_LOOK_EVERY_S):
                return None
        with span(_TRACK, f"step {policy_version + 1}"):
            return self._train_step.prepare(groups, policy_version=policy_version, track=_TRACK)


def _are_same(trajectories: Sequence[Trajectory], groups: Sequence[Group]) -> bool:
    """Return True if these are the trajectories of the groups, in this order."""
    of_groups = [trajectory for group in groups for trajectory in group.trajectories]
    return len(of_groups) == len(trajectories) and all(map(operator.is_, trajectories, of_groups))
