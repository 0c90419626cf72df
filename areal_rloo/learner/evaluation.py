"""Evaluation on the held-out split, beside training: leases outside the ledger, greedy, pinned to one version.

The intake hands the leases to rollout workers and brings the trajectories back; rollouts are never paused for it. One
evaluation is under way at a time; a version that falls due meanwhile waits, and the newest due one wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from areal_rloo.learner.prompts import Prompt
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.messages import Lease


class Evaluation:
    """The held-out prompts, and the one evaluation under way."""

    def __init__(self, prompts: Sequence[Prompt], on_record: Callable[[EvalRecord], None]) -> None:
        self._prompts = prompts
        self._on_record = on_record
        self._num_started = 0
        self._due: int | None = None
        self._version = 0
        self._started_s = 0.0
        self._to_lease: list[int] = []
        self._missing: set[int] = set()
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._versions: list[int] = []

    @property
    def finished(self) -> bool:
        """Nothing under way and nothing due."""
        return self._due is None and not self._missing

    def request(self, policy_version: int) -> None:
        """Measure this version as soon as the one under way has ended."""
        if self._prompts:
            self._due = policy_version
            self._start_if_free()

    def take_leases(self, num: int) -> list[Lease]:
        """Up to `num` leases that no worker holds."""
        taken, self._to_lease = self._to_lease[:num], self._to_lease[num:]
        return [
            Lease(
                group_id=group_id,
                sample_indices=(0,),
                prompt_tokens=prompt.tokens,
                answer=prompt.answer,
                purpose="eval",
                min_version=self._version,
                seed=0,
            )
            for group_id in taken
            for prompt in [self._prompts[-group_id - 1 - (self._num_started - 1) * len(self._prompts)]]
        ]

    @property
    def num_to_lease(self) -> int:
        return len(self._to_lease)

    def lose(self, sample_id: SampleId) -> None:
        """The worker that held it will not bring it: it waits for another."""
        if sample_id[0] in self._missing:
            self._to_lease.append(sample_id[0])

    def finish(self, trajectory: Trajectory) -> None:
        """A trajectory of this evaluation, or of one that is over, which is ignored."""
        if trajectory.group_id in self._missing:
            versions = trajectory.completion.versions
            self._versions += [int(versions.min()), int(versions.max())]
            self._settle(trajectory.group_id, trajectory.reward, len(trajectory.completion.tokens))

    def fail(self, sample_id: SampleId) -> None:
        """Its reward could not be had: it counts as wrong."""
        if sample_id[0] in self._missing:
            self._settle(sample_id[0], 0.0, 0)

    def _settle(self, group_id: int, reward: float, num_tokens: int) -> None:
        self._missing.discard(group_id)
        if group_id in self._to_lease:
            self._to_lease.remove(group_id)
        self._rewards.append(reward)
        self._lengths.append(num_tokens)
        if not self._missing:
            num = len(self._rewards)
            self._on_record(
                EvalRecord(
                    policy_version=min(self._versions, default=self._version),
                    policy_version_max=max(self._versions, default=self._version),
                    accuracy=sum(self._rewards) / num,
                    num_prompts=num,
                    completion_tokens_mean=sum(self._lengths) / num,
                    wall_s=time.monotonic() - self._started_s,
                )
            )
            self._start_if_free()

    def _start_if_free(self) -> None:
        if self._missing or self._due is None:
            return
        self._version, self._due = self._due, None
        self._started_s = time.monotonic()
        first = self._num_started * len(self._prompts)
        self._num_started += 1
        self._to_lease = [-(first + index + 1) for index in range(len(self._prompts))]
        self._missing = set(self._to_lease)
        self._rewards, self._lengths, self._versions = [], [], []
