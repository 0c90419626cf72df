"""Every mend of the protocol, taken out: the search must find a schedule that fails without it.

A mutation replaces one method or function of the real parts by one with the defect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import msgspec

from areal_rloo.algorithm.staleness import num_admissible
from areal_rloo.intake.answers import Answers, Sender
from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Grant, Sample
from areal_rloo.intake.reward_failures import RewardFailures
from areal_rloo.intake.worker import Worker
from areal_rloo.rollout.protocol import EngineState, Orders, WorkerProtocol
from areal_rloo.weights.offers import Offers
from areal_rloo.wire import messages as wire


def _a_lost_failure_is_not_noticed() -> Any:
    """A failure is sent once, and neither an outbox nor a digest notices the loss."""
    poll = WorkerProtocol.poll

    def mutated(self: WorkerProtocol, now_s: float, engine: EngineState) -> list[wire.WorkerMessage]:
        messages = poll(self, now_s, engine)
        for message in messages:
            if isinstance(message, wire.Results) and message.failed and not message.finished:
                self._outbox.pop(message.number, None)
                self._num_results -= 1
        return messages

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(WorkerProtocol, "poll", mutated))
    stack.enter_context(_digests_are_not_compared())
    return stack


def _results_are_not_sent_again() -> Any:
    compare = WorkerProtocol._compare

    def mutated(self: WorkerProtocol, reply: wire.HeartbeatReply, orders: Orders) -> None:
        outbox, self._outbox = self._outbox, {}
        compare(self, reply, orders)
        self._outbox = outbox

    return patch.object(WorkerProtocol, "_compare", mutated)


def _a_late_failure_drops_the_sample() -> Any:
    return patch.object(Sample, "is_newest", lambda self, lease_id: not self.trajectories)


def _a_result_of_any_lease_counts() -> Any:
    def mutated(self: Answers, sender: Sender, duty: wire.Duty) -> Any:
        sample = self.leasing.sample(duty.sample_id)
        return (sample, Grant(duty.lease_id, sender.worker_id, 0)) if sample is not None else (None, None)

    return patch.object(Answers, "_lease_of", mutated)


def _a_failure_drops_a_sample_in_any_state() -> Any:
    return patch.object(Sample, "is_newest", lambda self, lease_id: True)


def _messages_for_an_earlier_learner_count() -> Any:
    handle = Intake.handle

    def mutated(self: Intake, peer: str, message: Any, now_s: float) -> Any:
        if isinstance(message, wire.Results):
            message = wire.Results(self.learner_id, message.number, message.finished, message.failed)
        return handle(self, peer, message, now_s)

    return patch.object(Intake, "handle", mutated)


def _lease_ids_begin_again_at_every_hello() -> Any:
    """Then two ends that lost different leases can agree on a number by chance."""
    welcome = Fleet.welcome

    def mutated(self: Fleet, hello: wire.Hello, peer: str, **values: Any) -> Worker:
        worker = welcome(self, hello, peer, **values)
        worker.newest_lease = 0
        return worker

    def differs(self: Worker, heartbeat: wire.Heartbeat) -> bool:
        return False

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(Fleet, "welcome", mutated))
    stack.enter_context(patch.object(Worker, "differs", differs))
    return stack


def _digests_are_not_compared() -> Any:
    return patch.object(Worker, "differs", lambda self, heartbeat: False)


def _lost_leases_are_not_noticed() -> Any:
    compare = WorkerProtocol._compare

    def mutated(self: WorkerProtocol, reply: wire.HeartbeatReply, orders: Orders) -> None:
        compare(self, msgspec.structs.replace(reply, newest_lease=0), orders)

    return patch.object(WorkerProtocol, "_compare", mutated)


def _late_leases_start() -> Any:
    """A worker starts a lease although it has told the learner that the lease was lost, or has it already."""
    handle = WorkerProtocol.handle

    def mutated(self: WorkerProtocol, message: Any, engine: EngineState) -> Orders:
        newest = self._newest_lease
        if isinstance(message, wire.Leases):
            self._newest_lease = 0
        orders = handle(self, message, engine)
        self._newest_lease = max(newest, self._newest_lease)
        return orders

    return patch.object(WorkerProtocol, "handle", mutated)


def _a_goodbye_removes_the_worker_of_its_name() -> Any:
    apply = Intake._apply

    def mutated(self: Intake, peer: str, message: Any, now_s: float) -> Any:
        worker = self.fleet.alive.get(peer.partition("#")[0])
        if isinstance(message, wire.Goodbye) and worker is not None:
            self.fleet.remove(worker)
            self._offers.leave(worker.worker_id)
            return []
        return apply(self, peer, message, now_s)

    return patch.object(Intake, "_apply", mutated)


def _samples_of_a_silent_worker_stay() -> Any:
    lose = Leasing.lose

    def mutated(self: Leasing, lost: Any, *, is_attempt: bool) -> None:
        lose(self, () if is_attempt else lost, is_attempt=is_attempt)

    return patch.object(Leasing, "lose", mutated)


def _silence_is_no_death() -> Any:
    return patch.object(Worker, "silent_until_s", lambda self, settings: float("inf"))


def _samples_of_a_dead_worker_wait() -> Any:
    """A death removes the worker alone; its samples are leased again after some later message."""
    tick = Intake.tick

    def mutated(self: Intake, now_s: float) -> Any:
        with patch.object(Intake, "grants", lambda self: []):
            return tick(self, now_s)

    return patch.object(Intake, "tick", mutated)


def _a_worker_without_progress_keeps_its_samples() -> Any:
    return patch.object(Fleet, "stalled", lambda self, now_s, wire: [])


def _nobody_is_overdue() -> Any:
    """A worker that claims progress keeps its samples for good."""
    return patch.object(Fleet, "overdue", lambda self, now_s, most_s, newest_lease: [])


def _diverged_weights_are_kept() -> Any:
    return patch.object(WorkerProtocol, "_check_history", lambda self, engine: None)


def _weights_are_known_by_their_version_alone() -> Any:
    """A worker that missed a whole learner has another history's version, with the same number."""

    def mutated(history: wire.History, learner_id: str | None, policy_version: int) -> bool:
        return learner_id == history[-1][0] or policy_version <= history[-1][1]

    return patch.object(wire, "is_of", mutated)


def _a_failed_offer_is_not_repeated() -> Any:
    def mutated(self: Offers, member: Any, now_s: float, *, first_s: float) -> None:
        member.again_s = float("inf")

    return patch.object(Offers, "_back_off", mutated)


def _an_error_of_the_transport_ends_the_offers() -> Any:
    """Its thread dies, and nobody notices."""

    def mutated(self: Offers, offer_id: int, detail: str, now_s: float) -> None:
        self.poll = lambda now_s: []  # type: ignore[method-assign]

    return patch.object(Offers, "broken", mutated)


def _a_lost_notice_is_not_repeated() -> Any:
    """Neither at a heartbeat nor after the deadline of the offer."""

    def mutated(self: Offers, worker_id: str, policy_version: int | None, *, number: int, **values: Any) -> None:
        self.join(worker_id, policy_version, number=number, now_s=values["now_s"])

    return patch.object(Offers, "heard", mutated)


def _an_adopted_sample_is_leased_to_another_too() -> Any:
    def mutated(self: Sample, lease_id: int, worker_id: str) -> bool:
        return self.is_newest(lease_id)

    return patch.object(Sample, "adopts", mutated)


def _every_duty_told_is_adopted() -> Any:
    def mutated(self: Intake, worker: Worker, duty: wire.Duty) -> bool:
        worker.hold(duty)
        return True

    return patch.object(Intake, "_adopt", mutated)


def _groups_are_not_fitted_to_other_options() -> Any:
    return patch("simulation.simulated_learner.refit", lambda ledger, **values: 0)


def _admission_counts_a_group_too_few() -> Any:
    def mutated(*, max_staleness: int, pipeline_depth: int, groups_per_step: int, num_live: int, **values: int) -> int:
        return max(0, (min(max_staleness, pipeline_depth) + 1) * groups_per_step - num_live + 1)

    return patch("areal_rloo.intake.leasing.num_admissible", mutated)


def _every_version_counts_as_published() -> Any:
    """Admission runs ahead of what the workers can have: `weights.publish_every_n_steps` leaves versions out."""

    def mutated(*, policy_version: int, published_version: int, **values: int) -> int:
        return num_admissible(policy_version=policy_version, published_version=policy_version, **values)

    return patch("areal_rloo.intake.leasing.num_admissible", mutated)


def _last_messages_of_the_dead_are_signs_of_life() -> Any:
    """A new process is refused until the silence of the dead process is too long."""

    def mutated(self: Worker, wire: Any) -> bool:
        return self.disconnected_s is None or self.last_heard_s > self.disconnected_s

    return patch.object(Worker, "is_connected", mutated)


def _departed_workers_have_no_vote() -> Any:
    def mutated(self: Fleet) -> Iterator[Any]:
        yield from (worker.standing.failed for worker in self.alive.values() if worker.standing.failed)

    return patch.object(Fleet, "votes", mutated)


def _nobody_is_set_aside() -> Any:
    """Then the failures of a single worker fill the last completions, and those of the others leave."""
    return patch.object(RewardFailures, "_by_most", lambda self, workers: True)


def _workers_that_lost_leases_wait_for_good() -> Any:
    try_again = Fleet.try_again

    def mutated(self: Fleet, now_s: float) -> None:
        waiting = [worker for worker in self.alive.values() if worker.standing.waits]
        try_again(self, now_s)
        for worker in waiting:
            worker.standing.waits = True

    return patch.object(Fleet, "try_again", mutated)


MUTATIONS: dict[str, Callable[[], Any]] = {
    name.removeprefix("_"): made
    for name, made in list(globals().items())
    if name.startswith("_") and callable(made) and getattr(made, "__module__", "") == __name__
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Take out the mend of this name."""
    with MUTATIONS[name]():
        yield
