"""The intake: turns each message of a rollout worker into a change of the ledger and into replies.

In: messages, time, and the decisions of the training thread (take a batch, commit a version). Out: messages to send.
The intake does no I/O and never waits, so a test can drive it through any schedule. `service.py` runs the intake on an
event loop and connects it to the wire.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from areal_rloo.config import Config
from areal_rloo.errors import RewardError
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Ledger, by_sample
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.reward_failures import RewardFailures
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Group, SampleId, Trajectory, purpose_of
from areal_rloo.wire import messages as wire

if TYPE_CHECKING:  # imports torch
    from torch import Tensor

    from areal_rloo.weights.broadcast import Broadcaster

logger = get_logger(__name__)


class Outgoing(NamedTuple):
    """A message to send, and the peer to send it to."""

    peer: str
    message: wire.LearnerMessage


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """State of the intake now. `rollout_idle_s` and `generated_tokens` are sums over workers since the start."""

    ledger: LedgerCounts
    num_workers: int
    rollout_idle_s: float
    generated_tokens: int
    filtered_prompts: int
    truncated_prompts: int


class Intake:
    """Owns the ledger, the prompt stream, the evaluation and the fleet. Single-threaded."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        stream: PromptStream,
        evaluation: Evaluation,
        versions: Broadcaster,
        policy_version: int,
        group_filter: Callable[[Group], bool] | None = None,
        num_truncated: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            ledger: empty, or restored from a checkpoint.
            versions: told of every worker that joins, leaves, receives weights or fails to.
            policy_version: the learner's version at the start.
            group_filter: returns False for a group to drop (user code).
        """
        self.ledger, self.stream, self.evaluation, self.fleet = ledger, stream, evaluation, Fleet()
        self.draining = self._stopping = False
        self._versions, self._policy_version, self._num_truncated = versions, policy_version, num_truncated
        self._max_tokens = config.learner.microbatch_tokens
        self._heartbeat_timeout_s = config.wire.heartbeat_timeout_s
        self._failures = RewardFailures(config)
        self._learner_id = uuid.uuid4().hex
        self._buffer = Buffer(ledger, config=config, give_back=stream.give_back, group_filter=group_filter)
        self._leasing = Leasing(config=config, ledger=ledger, buffer=self._buffer, stream=stream, evaluation=evaluation)
        for group_id, group in list(ledger.groups.items()):  # the run before may have had longer rows
            for sample_index, sample in list(group.samples.items()):
                self._refuse_if_too_long((group_id, sample_index), sample.trajectories)

    # -- messages of the workers ---------------------------------------------------------------------------------------

    def handle(self, peer: str, message: wire.WorkerMessage, now_s: float) -> list[Outgoing]:
        """Apply a message; returns the messages to send.

        Raises:
            UserError: too many completions got no reward.
        """
        replies: list[Outgoing] = []
        match message:
            case wire.TrajectoryBatch() | wire.SampleFailed() if peer not in self.fleet.met:
                pass  # leased by an earlier learner: the group id may name another prompt now
            case wire.TrajectoryBatch():
                self._finish(message)
                replies = [Outgoing(peer, wire.TrajectoryAck((message.batch_id,)))]
            case wire.Heartbeat():
                replies = [Outgoing(peer, self._heartbeat_reply(message, now_s))]
            case wire.Hello():
                replies = [Outgoing(peer, reply) for reply in self._welcome(peer, message, now_s)]
            case wire.SampleFailed():
                self._fail(message)
            case wire.WeightsReceived():
                self._versions.acknowledge(message.worker_id, message.policy_version, message.checksum)
            case wire.WeightsFailed():
                self._versions.fail(message.worker_id, message.policy_version, message.detail)
            case wire.Goodbye() if message.worker_id in self.fleet.alive:
                logger.info("%s says goodbye", message.worker_id)
                self._remove(message.worker_id)
        return replies + self.grants()

    def remove_silent(self, now_s: float) -> list[Outgoing]:
        """Treat workers without a recent heartbeat as dead, and lease their unfinished samples again."""
        timeout_s = self._heartbeat_timeout_s
        for worker in list(self.fleet.alive.values()):
            if now_s - worker.last_heard_s > timeout_s:
                logger.warning("no heartbeat from %s for %.1f s: lease its samples again", worker.worker_id, timeout_s)
                self._remove(worker.worker_id)
        return self.grants()

    def grants(self) -> list[Outgoing]:
        """Grant all leases possible now."""
        if self.draining:
            return []
        granted = self._leasing.grants(list(self.fleet.alive.values()), self._policy_version)
        return [Outgoing(worker.peer, leases) for worker, leases in granted]

    # -- decisions of the training thread ------------------------------------------------------------------------------

    def take_batch(self) -> list[Group] | None:
        """Take the batch of the step at the current version; None while the batch is not complete."""
        return None if self.draining else self._buffer.take(self._policy_version, last=self.stream.exhausted)

    @property
    def no_more_batches(self) -> bool:
        """True if no batch will ever come: a drain has begun, or all prompts are used up."""
        return self.draining or (self.stream.exhausted and not self.ledger.groups)

    def commit(self, policy_version: int, buckets: Sequence[Tensor], *, evaluate: bool) -> list[Outgoing]:
        """Make a version current: publish the weights, count the batch taken last as trained, move admission on.

        `buckets` has the weights, as `Broadcaster.publish` takes them.
        """
        self._versions.publish(policy_version, buckets)
        self._buffer.trained()
        self._policy_version = policy_version
        return self.evaluate() if evaluate else self.grants()

    def refuse_batch(self, reason: str) -> list[Outgoing]:
        """Drop the batch taken last, for this reason."""
        self._buffer.refused(reason)
        return self.grants()

    def evaluate(self) -> list[Outgoing]:
        """Evaluate the current version as soon as a running evaluation has ended."""
        self.evaluation.request(self._policy_version)
        return self.grants()

    def stop(self) -> list[Outgoing]:
        """Tell every worker to drain; a worker that says Hello later is told then."""
        self.draining = self._stopping = True
        return [Outgoing(worker.peer, wire.Drain()) for worker in self.fleet.alive.values()]

    def statistics(self) -> IntakeStatistics:
        heartbeats = self.fleet.heartbeats.values()
        return IntakeStatistics(
            ledger=self.ledger.counts(),
            num_workers=len(self.fleet.alive),
            rollout_idle_s=sum(heartbeat.idle_s for heartbeat in heartbeats),
            generated_tokens=sum(heartbeat.generated_tokens for heartbeat in heartbeats),
            filtered_prompts=self.stream.num_filtered,
            truncated_prompts=self._num_truncated(),
        )

    def describe(self, now_s: float) -> str:
        """Describe the current state for a log line about a wait."""
        workers = [
            f"{w.worker_id} holds {len(w.held)} samples at version {w.policy_version}, last heard "
            f"{now_s - w.last_heard_s:.1f} s ago"
            for w in self.fleet.alive.values()
        ]
        dropped = ", ".join(f"{n} {reason}" for reason, n in self.ledger.counts().dropped.items())
        return (
            f"{len(self._buffer.ready())} groups ready; samples dropped so far: {dropped or 'none'}; "
            f"{'; '.join(workers) or 'no rollout worker is connected'}"
        )

    # -- samples -------------------------------------------------------------------------------------------------------

    def _finish(self, batch: wire.TrajectoryBatch) -> None:
        """Record finished samples, each with all trajectories."""
        samples = by_sample(batch.trajectories)
        self._failures.scored(len(samples))
        for sample_id, trajectories in samples.items():
            self.fleet.release(batch.worker_id, sample_id)
            if purpose_of(sample_id[0]) == "eval":
                self.evaluation.finish(trajectories)
            elif self._refuse_if_too_long(sample_id, trajectories):
                pass
            elif (group := self.ledger.finish(trajectories)) is not None:
                self._buffer.settle(group)

    def _fail(self, message: wire.SampleFailed) -> None:
        """Record that a sample will never be finished."""
        sample_id = (message.group_id, message.sample_index)
        error = RewardError(message.reason, message.detail)
        logger.warning("drop sample %s: %s: %s", sample_id, error.reason, error.summary)
        self.fleet.release(message.worker_id, sample_id)
        if purpose_of(message.group_id) == "eval":
            self.evaluation.fail(sample_id)
        else:
            completion = f"\ncompletion: {message.completion}" if message.completion else ""
            self._leasing.drop(sample_id, message.reason, detail=message.detail + completion)
        self._failures.failed(error)

    def _refuse_if_too_long(self, sample_id: SampleId, trajectories: Iterable[Trajectory]) -> bool:
        """Drop a sample if no row of the learner holds its longest trajectory; returns True if dropped."""
        num_tokens = max((trajectory.num_tokens for trajectory in trajectories), default=0)
        if num_tokens - 1 <= self._max_tokens:  # the last token of a row predicts nothing
            return False
        detail = f"sample {sample_id} has {num_tokens} tokens, more than learner.microbatch_tokens={self._max_tokens}"
        logger.error("%s: drop the sample; raise that option, or shorten prompts and completions", detail)
        self._leasing.drop(sample_id, "too_long", detail=detail)
        return True

    # -- workers -------------------------------------------------------------------------------------------------------

    def _welcome(self, peer: str, hello: wire.Hello, now_s: float) -> list[wire.LearnerMessage]:
        before = self.fleet.alive.get(hello.worker_id)
        if before is not None and before.incarnation != hello.incarnation:
            self._versions.leave(hello.worker_id)  # the earlier process will not take what was offered to it
        worker, lost = self.fleet.welcome(hello, peer, now_s=now_s, policy_version=self._policy_version)
        logger.info("%s joins with version %s (%d samples lost)", hello.worker_id, hello.policy_version, len(lost))
        self._leasing.lose(lost)
        self._versions.join(hello.worker_id, hello.policy_version)
        replies: list[wire.LearnerMessage] = [wire.Welcome(self._learner_id, self._policy_version)]
        if unknown := tuple(sample_id for sample_id in hello.held if sample_id not in worker.held):
            replies.append(wire.Abort(unknown))
        if self._stopping:
            replies.append(wire.Drain())  # this worker came after the others were told
        return replies

    def _heartbeat_reply(self, heartbeat: wire.Heartbeat, now_s: float) -> wire.HeartbeatReply:
        worker = self.fleet.heard(heartbeat, now_s)
        if worker is not None:
            self._versions.heard(heartbeat.worker_id, heartbeat.policy_version)
        sequence = -1 if worker is None else worker.lease_sequence  # -1: the worker must say Hello
        return wire.HeartbeatReply(self._learner_id, self._policy_version, sequence)

    def _remove(self, worker_id: str) -> None:
        self._leasing.lose(self.fleet.alive.pop(worker_id).held)
        self._versions.leave(worker_id)
