"""Answers: what workers send about leased samples. Each is held against its lease (`lies.py`), then recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from areal_rloo.errors import RewardError
from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Grant, Sample
from areal_rloo.intake.lies import Lie, Lies
from areal_rloo.intake.reward_failures import RewardFailures
from areal_rloo.intake.worker import Standing, Worker
from areal_rloo.rewards.request import FailureReason
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.words import Words
from areal_rloo.trajectory import SampleId, Trajectory, longest_row
from areal_rloo.wire.messages import Duty, Failed, Partials, Results
from areal_rloo.wire.turns import num_written

_MOST_REASONS = 64  # of failures, over the whole run


class Sender(NamedTuple):
    """The sender of a message: a process that has said Hello; `worker` is None if the process is taken for dead."""

    peer: str
    worker_id: str
    worker: Worker | None

    @property
    def standing(self) -> Standing | None:
        return None if self.worker is None else self.worker.standing


@dataclass(slots=True, kw_only=True)
class Answers:
    """Records the outcomes of duties."""

    fleet: Fleet
    leasing: Leasing
    failures: RewardFailures
    lies: Lies
    num_repeated: int = 0  # answers that came too late, or twice
    _reasons: Words = field(init=False)  # of failures: a user's episode may have reasons of its own

    def __post_init__(self) -> None:
        self._reasons = Words(_MOST_REASONS, known={*get_args(FailureReason), *self.leasing.ledger.counts().dropped})

    def take_results(self, sender: Sender, results: Results, policy_version: int) -> list[tuple[Worker, Duty]]:
        """Record finished and failed duties. The results of a worker taken for dead are welcome, too.

        Returns the duties of other workers that are in vain now.
        """
        in_vain: list[tuple[Worker, Duty]] = []
        lowest = self.lies.lowest_plain_version(results, policy_version, self.leasing.prompt_to_train)
        for lease_id, trajectories in results.finished:
            if not self.lies.is_cut_off(sender.peer):
                duty = Duty(lease_id, *trajectories[0].sample_id)
                in_vain += self._finish(sender, duty, trajectories, policy_version, lowest)
        for failed in results.failed:
            if not self.lies.is_cut_off(sender.peer):
                self._fail(sender, failed)
        return in_vain

    def refuse_invented(self, sender: Sender, duties: Iterable[Duty]) -> None:
        """Refuse the duties of a Hello if this learner cannot have granted them."""
        for duty in duties:
            if not self.leasing.has_granted(duty) and not self.lies.is_cut_off(sender.peer):
                self._refuse(sender, duty, "no_such_lease")

    def take_partials(self, sender: Sender, message: Partials, policy_version: int) -> None:
        """Keep the partial rollouts of duties."""
        for partial in message.partials:
            duty = Duty(partial.lease_id, partial.group_id, partial.sample_index)
            sample, grant = self._lease_of(sender, duty)
            if sample is None or grant is None or duty.purpose == "eval" or self.lies.is_cut_off(sender.peer):
                continue
            lie = self.lies.in_partial(partial.turns, grant=grant, policy_version=policy_version)
            if lie is not None:
                self._refuse(sender, duty, lie)
            elif sample.is_newest(duty.lease_id):
                sample.partial = partial.turns
        worker = sender.worker
        if worker is not None and message.last and message.call_id == worker.owes_partials:
            worker.owes_partials = None

    def _finish(
        self, sender: Sender, duty: Duty, trajectories: tuple[Trajectory, ...], policy_version: int, lowest: int | None
    ) -> list[tuple[Worker, Duty]]:
        """Record all trajectories of a sample; a repeat, and a sample with an outcome, change nothing."""
        if sender.worker is not None:
            self.fleet.release(sender.worker, duty)
        sample, grant = self._lease_of(sender, duty)
        if sample is None or grant is None:
            return []
        lie: Lie | None = None
        is_plain = lowest is not None and lowest >= grant.min_version  # then nothing is wrong, or too long
        if not is_plain:
            lie = self.lies.in_trajectories(trajectories, grant, self.leasing.prompt(duty.group_id), policy_version)
        if lie is not None:
            self._refuse(sender, duty, lie)
            self.leasing.lose([duty], is_attempt=True)
            return []
        trace.record("intake", "arrived", group=duty.group_id, samples=[duty.sample_index], lease=duty.lease_id)
        in_vain = [] if sample.is_newest(duty.lease_id) else self._release_holder(sample, duty.sample_id)
        self.failures.scored(sender.standing)
        if duty.purpose == "eval":
            self.leasing.evaluation.finish(trajectories)
        elif is_plain or not self._refuse_if_too_long(duty.sample_id, trajectories):
            self.leasing.buffer.settle(self.leasing.ledger.finish(duty.sample_id, trajectories))
        return in_vain

    def _fail(self, sender: Sender, failed: Failed) -> None:
        """Drop a failed sample, unless another lease can still finish the sample, or it began from a partial rollout.

        Raises:
            UserError: too many completions got no reward.
        """
        duty = Duty(failed.lease_id, failed.group_id, failed.sample_index)
        if sender.worker is not None:
            self.fleet.release(sender.worker, duty)
        sample, grant = self._lease_of(sender, duty)
        if sample is None or grant is None:
            return
        if not sample.is_newest(duty.lease_id):
            self.num_repeated += 1
            return
        num_tokens = min(failed.num_tokens, self.leasing.config.partial_tokens)
        if grant.continues and not failed.reason.startswith("reward_"):
            sample.partial = b""  # another worker's, and perhaps why the episode failed: begin anew, once
            self.leasing.lose([duty], is_attempt=True, num_tokens=num_tokens)
            return
        self.failures.failed(sender.standing, RewardError(failed.reason, failed.detail), self.fleet.votes())
        if failed.reason == "reward_unavailable" and sample.num_attempts + 1 < self.leasing.config.wire.max_attempts:
            self.leasing.lose([duty], is_attempt=True)
            return
        completion = f"\ncompletion: {failed.completion}" if failed.completion else ""
        reason = self._reasons.label(failed.reason)
        self.leasing.drop(duty.sample_id, reason, detail=failed.detail + completion, num_tokens=num_tokens)

    def _lease_of(self, sender: Sender, duty: Duty) -> tuple[Sample, Grant] | tuple[None, None]:
        """Return the sample of a duty without an outcome, and the lease; None for a repeat, and for a lie."""
        sample = self.leasing.sample(duty.sample_id)
        grant = None if sample is None else sample.grant(duty.lease_id)
        if grant is not None and grant.worker_id == sender.worker_id and sample is not None and not sample.trajectories:
            return sample, grant
        granted = grant is not None or self.leasing.has_granted(duty)
        lie = self.lies.about_lease(duty, sample, grant, sender.worker_id, granted=granted)
        if lie is not None:
            self._refuse(sender, duty, lie)
        else:
            self.num_repeated += 1
        return None, None

    def _refuse(self, sender: Sender, duty: Duty, lie: Lie) -> None:
        self.lies.count(lie, peer=sender.peer, worker_id=sender.worker_id, duty=duty)
        if sender.worker is not None:
            sender.worker.num_lies += 1

    def _release_holder(self, sample: Sample, sample_id: SampleId) -> list[tuple[Worker, Duty]]:
        """Release the duty of another worker whose sample an earlier holder has finished."""
        duty = Duty(sample.leases[-1].lease_id, *sample_id)
        worker = self.fleet.alive.get(sample.worker_id) if sample.worker_id is not None else None
        if worker is None or duty not in worker.duties:
            return []
        self.fleet.release(worker, duty)
        return [(worker, duty)]

    def _refuse_if_too_long(self, sample_id: SampleId, trajectories: Sequence[Trajectory]) -> bool:
        """Drop a sample if no row of the learner holds its longest trajectory; returns True if dropped."""
        longest, most = longest_row(trajectories), self.lies.max_row_tokens
        if longest <= most:
            return False
        detail = (
            f"sample {sample_id} has {longest + 1} tokens, more than learner.microbatch_tokens={most}; "
            "raise that option, or shorten prompts and completions"
        )
        num_tokens = sum(num_written(trajectory.completion) for trajectory in trajectories)
        self.leasing.drop(sample_id, "too_long", detail=detail, num_tokens=num_tokens)
        return True
