"""The intake: turns each message of a rollout worker into a change of the ledger and into replies.

In: messages, time, and the decisions of the training thread (take a batch, commit a version). Out: messages to send.
The intake does no I/O and never waits, so a test can drive it through any schedule. `service.py` runs the intake on an
event loop and connects it to the wire.
"""

from __future__ import annotations

from collections.abc import Callable

from areal_rloo.config import Config
from areal_rloo.intake.answers import Answers, Sender
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Fleet, Outgoing
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.reward_failures import RewardFailures
from areal_rloo.intake.work import IntakeStatistics
from areal_rloo.intake.worker import Worker
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Group
from areal_rloo.weights.offers import Offers
from areal_rloo.wire import messages as wire

logger = get_logger(__name__)

_END = wire.Refusal("this process sent answers that its leases do not allow", final=True)
_Addressed = wire.Results | wire.Partials | wire.WeightsReady | wire.WeightsReceived | wire.WeightsFailed | wire.Goodbye


class Intake:
    """Owns the ledger, the prompt stream, the evaluation and the fleet. Single-threaded."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        stream: PromptStream,
        evaluation: Evaluation,
        offers: Offers,
        policy_version: int,
        history: wire.History,
        lies: Lies,
        group_filter: Callable[[Group], bool] | None = None,
        num_truncated: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            ledger: empty, or restored from a checkpoint.
            offers: told of every worker that joins, leaves, receives weights or fails to.
            policy_version: the learner's version at the start, published before the first lease.
            history: the learners up to this one; the last learner id is of this start alone.
            lies: the rules for answers.
            group_filter: returns False for a group to drop (user code).
        """
        self.ledger, self.stream, self.evaluation = ledger, stream, evaluation
        self.fleet = Fleet(most_samples=config.capacity_samples, num_expected=config.rollout.num_workers)
        self.draining = self._stopping = False
        self.history, (self.learner_id, _) = history, history[-1]
        trace.record("intake", "begins", learner=self.learner_id)
        self._offers, self._num_truncated = offers, num_truncated
        self._policy_version = self._published = policy_version
        self._wire, self._lease_timeout_s = config.wire, config.lease_timeout_s
        self._num_partials_calls = 0
        note = None if stream.curriculum is None else stream.curriculum.note
        self.buffer = Buffer(ledger, config=config, give_back=stream.give_back, group_filter=group_filter, note=note)
        self._leasing = Leasing(
            config=config, ledger=ledger, fleet=self.fleet, buffer=self.buffer, stream=stream, evaluation=evaluation
        )
        failures = RewardFailures(config)
        self._answers = Answers(fleet=self.fleet, leasing=self._leasing, failures=failures, lies=lies)

    # -- messages of the workers ---------------------------------------------------------------------------------------

    def handle(self, peer: str, message: wire.WorkerMessage, now_s: float) -> list[Outgoing]:
        """Apply a message; returns the messages to send.

        Raises:
            UserError: too many completions got no reward.
        """
        if self.lies.is_cut_off(peer):
            return [Outgoing(peer, _END)] if isinstance(message, wire.Hello | wire.Heartbeat) else []
        if isinstance(message, wire.Hello):
            replies = self._welcome(peer, message, now_s)
        elif isinstance(message, wire.Heartbeat):  # no grants: the next tick is soon, and grants look at all workers
            return self._answer_heartbeat(peer, message, now_s)
        elif message.learner_id != self.learner_id:
            replies = []  # addressed to an earlier learner: the ids mean other samples now
        else:
            replies = self._apply(peer, message, now_s)
        return replies if self.owes_grants else replies + self.grants()

    def disconnected(self, peer: str, now_s: float) -> None:
        """Record the end of the connection to a peer: the process has ended, or will connect again."""
        if (worker := self.fleet.at(peer)) is not None:
            worker.disconnected_s = now_s

    def tick(self, now_s: float, *, late_s: float = 0.0) -> list[Outgoing]:
        """Treat silent workers as dead; take duties without progress or held too long. `late_s`: nothing was read."""
        for worker in self.fleet.silent(now_s, self._wire, late_s):
            self._remove(worker)
        outgoing = [self._take_duties(worker, is_attempt=True) for worker in self.fleet.stalled(now_s, self._wire)]
        for worker in self.fleet.overdue(now_s, self._lease_timeout_s, self._leasing.newest_lease):
            self.fleet.set_aside(worker, now_s, "holds samples for longer than their episodes can take")
            outgoing.append(self._take_duties(worker, is_attempt=True))
        self.fleet.try_again(now_s)
        return outgoing + self.grants()

    def grants(self) -> list[Outgoing]:
        """Grant leases: all that are possible now, or a part of a large step."""
        if self.draining:
            return []
        granted = self._leasing.grants(self._policy_version, self._published)
        return [Outgoing(worker.peer, wire.Leases(self.learner_id, tuple(leases))) for worker, leases in granted]

    @property
    def owes_grants(self) -> bool:
        """True if another `grants` is due at once."""
        return self._leasing.owes and not self.draining

    # -- decisions of the training thread ------------------------------------------------------------------------------

    def take_batch(self) -> list[Group] | None:
        """Take the batch of the step at the current version; None while the batch is not complete."""
        return None if self.draining else self.buffer.take(self._policy_version, is_last=lambda: self.stream.exhausted)

    @property
    def lies(self) -> Lies:
        """The answers refused so far."""
        return self._answers.lies

    @property
    def no_more_batches(self) -> bool:
        """True if no batch will ever come: a drain has begun, or all prompts are used up."""
        return self.draining or (self.stream.exhausted and not self.ledger.groups)

    def commit(self, policy_version: int, *, evaluate: bool, published: bool = True) -> list[Outgoing]:
        """Make a version current: count the batch taken last as trained, move admission on."""
        self.buffer.trained()
        self._policy_version = policy_version
        self._published = policy_version if published else self._published
        return self.evaluate() if evaluate else self.grants()

    def refuse_batch(self, reason: str) -> list[Outgoing]:
        """Drop the batch taken last, for this reason."""
        self.buffer.refused(reason)
        return self.grants()

    def evaluate(self) -> list[Outgoing]:
        """Evaluate the current version as soon as a running evaluation has ended."""
        self.evaluation.request(self._policy_version)
        return self.grants()

    def call_for_partials(self) -> list[Outgoing]:
        """Ask all workers for the partial rollouts of their samples."""
        self._num_partials_calls += 1
        call = wire.PartialsCall(self.learner_id, self._num_partials_calls)
        for worker in self.fleet.alive.values():
            worker.owes_partials = call.call_id if worker.num_train else None
        return [Outgoing(worker.peer, call) for worker in self.fleet.alive.values() if worker.num_train]

    @property
    def has_partials(self) -> bool:
        """True if all workers have answered the last call for partial rollouts, or are gone."""
        return all(worker.owes_partials is None for worker in self.fleet.alive.values())

    def stop(self) -> list[Outgoing]:
        """Tell every worker to drain; later workers are told at their Hello."""
        self.draining = self._stopping = True
        return [Outgoing(worker.peer, wire.Drain()) for worker in self.fleet.alive.values()]

    def statistics(self) -> IntakeStatistics:
        work = self.fleet.work()
        return IntakeStatistics(
            ledger=self.ledger.counts(),
            num_workers=len(self.fleet.alive),
            num_behind=self._offers.num_behind,
            rollout_idle_s=work.idle_s,
            generated_tokens=work.generated_tokens,
            rollout_busy_s=work.busy_s,
            decoding_s=work.decoding_s,
            repeated_results=self._answers.num_repeated,
            filtered_prompts=self.stream.num_filtered,
            epoch=self.stream.epoch,
            truncated_prompts=self._num_truncated(),
        )

    def describe(self, now_s: float) -> str:
        """Describe the current state for a log line about a wait."""
        dropped = ", ".join(f"{n} {reason}" for reason, n in self.ledger.counts().dropped.items())
        return (
            f"{self.buffer.num_ready} groups ready; samples dropped so far: {dropped or 'none'}; "
            f"{self.fleet.describe(now_s)}"
        )

    # -- samples -------------------------------------------------------------------------------------------------------

    def _apply(self, peer: str, message: _Addressed, now_s: float) -> list[Outgoing]:
        """Apply a message addressed to this learner."""
        worker, name = self.fleet.at(peer), self.fleet.name_of(peer)
        if name is None or (worker is None and name in self.fleet.alive and not isinstance(message, wire.Goodbye)):
            return []  # never welcomed, or an earlier process: a later process has the name, and the leases
        match message:
            case wire.Results():
                num_duties, num_train = (0, 0) if worker is None else (len(worker.duties), worker.num_train)
                in_vain = self._answers.take_results(Sender(peer, name, worker), message, self._published)
                self.buffer.free(len(message.finished) + len(message.failed))
                aborts = [Outgoing(other.peer, wire.Abort(self.learner_id, (duty,))) for other, duty in in_vain]
                replies = [Outgoing(peer, wire.Ack(message.number)), *aborts, *self._cut_off(peer)]
                if worker is not None and self.fleet.at(peer) is worker:
                    if (num_answers := num_duties - len(worker.duties)) > 0:
                        worker.progress_s, worker.stalled, worker.standing.held_s = now_s, False, 0.0
                        worker.eval_s = now_s if num_answers > num_train - worker.num_train else worker.eval_s
                    why = self._answers.failures.blame(worker.standing, self.fleet.votes())
                    if why is not None and worker.gets_leases:
                        self.fleet.set_aside(worker, now_s, why)
                        replies.append(self._take_duties(worker, is_attempt=False))
                return replies
            case wire.Partials():
                self._answers.take_partials(Sender(peer, name, worker), message, self._published)
                return self._cut_off(peer)
            case wire.Goodbye():
                self.fleet.record_work(peer, message.work)
                if worker is not None:
                    logger.info("%s says goodbye", worker.worker_id)
                    self._remove(worker, failed=message.failed)
                return []
            case wire.WeightsReady():
                if worker is not None:
                    self._offers.ready(worker.worker_id, message.offer_id)
                return []
            case wire.WeightsReceived() if worker is not None:
                offer_id, number = message.offer_id, message.number
                self._offers.received(worker.worker_id, offer_id, message.checksum, number=number, now_s=now_s)
            case wire.WeightsFailed() if worker is not None:
                offer_id, number = message.offer_id, message.number
                self._offers.failed(worker.worker_id, offer_id, message.detail, number=number, now_s=now_s)
        return [Outgoing(peer, wire.Ack(message.number))]

    def _cut_off(self, peer: str) -> list[Outgoing]:
        """Forget a worker that lied often, and tell the process to end."""
        if not self.lies.is_cut_off(peer):
            return []
        if (worker := self.fleet.at(peer)) is not None:
            self._remove(worker)
        return [Outgoing(peer, _END)]

    # -- workers -------------------------------------------------------------------------------------------------------

    def _welcome(self, peer: str, hello: wire.Hello, now_s: float) -> list[Outgoing]:
        """Register a worker, and settle which duties are still the worker's."""
        before = self.fleet.alive.get(hello.worker_id)
        is_another = before is not None and before.peer != peer
        if is_another and self.fleet.name_of(peer) is not None:  # an earlier process, which a later one has replaced
            logger.warning("tell an earlier process of %s to end", hello.worker_id)
            return [Outgoing(peer, wire.Drain())]
        if (refusal := self.fleet.refuses(hello, peer, self._wire)) is not None:
            logger.error("a Hello of %s is refused: %s", hello.worker_id, refusal)
            return [Outgoing(peer, wire.Refusal(refusal))]
        if before is not None and is_another:
            self._remove(before)
        worker = self.fleet.welcome(hello, peer, now_s=now_s, policy_version=self._published)
        self._offers.join(worker.worker_id, hello.policy_version, number=hello.number, now_s=now_s)
        has_met = hello.learner_id == self.learner_id  # else all leases of this learner are still on their way
        told = set(hello.duties) if has_met else set()
        lost = {duty for duty in worker.duties if has_met and duty.lease_id <= hello.newest_lease} - told
        for duty in lost:
            self.fleet.release(worker, duty)
        self._leasing.lose(lost, is_attempt=False)  # the same process loses no duty once it has come
        worker.standing.waits = worker.standing.waits or bool(lost)
        self._answers.refuse_invented(Sender(peer, worker.worker_id, worker), told)
        if self.lies.is_cut_off(peer):
            return self._cut_off(peer)
        void = tuple(sorted(duty for duty in told - worker.duties if not self._adopt(worker, duty)))
        logger.info(
            "%s says hello with version %s: %d duties, %d lost on their way, %d void",
            *(worker.worker_id, hello.policy_version, len(told), len(lost), len(void)),
        )
        replies: list[wire.LearnerMessage] = [wire.Welcome(self.learner_id, hello.number, self.history)]
        if void:
            replies.append(wire.Abort(self.learner_id, void))
        if self._stopping:
            replies.append(wire.Drain())  # this worker came after the others were told
        return [Outgoing(peer, reply) for reply in replies]

    def _adopt(self, worker: Worker, duty: wire.Duty) -> bool:
        """Let a worker taken for dead go on with a duty, unless another worker has begun the sample."""
        sample = self._leasing.sample(duty.sample_id)
        if sample is None or worker.standing.set_aside_until_s is not None:
            return False
        if not sample.adopts(duty.lease_id, worker.worker_id):
            return False
        worker.hold(duty)
        return True

    def _answer_heartbeat(self, peer: str, heartbeat: wire.Heartbeat, now_s: float) -> list[Outgoing]:
        worker = self.fleet.at(peer)
        newest_lease, say_hello = 0, True
        if worker is not None:
            self.fleet.heard(worker, heartbeat, now_s)
        if worker is not None and heartbeat.learner_id == self.learner_id:
            self._offers.heard(
                worker.worker_id,
                heartbeat.policy_version,
                number=heartbeat.number,
                newest_offer=heartbeat.newest_offer,
                receiving=heartbeat.receiving,
                now_s=now_s,
            )
            newest_lease, say_hello = worker.newest_lease, self.fleet.differs(worker, heartbeat, now_s, self._wire)
        reply = wire.HeartbeatReply(self.learner_id, heartbeat.number, newest_lease, say_hello)
        return [Outgoing(peer, reply), *([Outgoing(peer, wire.Drain())] if self._stopping else [])]

    def _take_duties(self, worker: Worker, *, is_attempt: bool) -> Outgoing:
        """Queue the samples of a worker for others; returns the message that cancels the duties."""
        duties = tuple(sorted(worker.duties))
        for duty in duties:
            self.fleet.release(worker, duty)
        self._leasing.lose(duties, is_attempt=is_attempt)
        return Outgoing(worker.peer, wire.Abort(self.learner_id, duties))

    def _remove(self, worker: Worker, *, failed: bool = True) -> None:
        """Forget a worker, and lease its samples again. They may be why it `failed`, but not why it was stopped."""
        self.fleet.remove(worker)
        self._leasing.lose(worker.duties, is_attempt=failed)
        worker.standing.waits = worker.standing.waits or bool(worker.duties)
        self._offers.leave(worker.worker_id)
