"""The learner of the simulation: the real intake, ledger, buffer, leasing and offers; pretended training and disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from simulation.world import HEARTBEAT_S, ViolationError
from support.slow_intake import differences, missed_leases

from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.config import Config
from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.fleet import FleetStatistics, Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import Prompt, PromptStreamState
from areal_rloo.intake.refit import refit
from areal_rloo.intake.saved_ledger import LedgerState, ledger_of, ledger_state
from areal_rloo.trajectory import Group, Item, SampleId, Trajectory
from areal_rloo.weights.commands import Begin, Call, Repeat
from areal_rloo.weights.offers import Offers
from areal_rloo.wire import messages as wire
from areal_rloo.wire.messages import Duty

if TYPE_CHECKING:
    from simulation.simulated_run import Simulation

_TICK_S = 0.5
_OFFER_TIMEOUT_S = 4.0
_PARTIALS_S = 2.0
_EVAL_PROMPT = Prompt(0, 0, (7,), Item("?"))


@dataclass(frozen=True)
class Checkpoint:
    """What a learner finds after a restart."""

    version: int
    history: wire.History
    ledger: LedgerState
    trajectories: dict[SampleId, tuple[Trajectory, ...]]
    stream: PromptStreamState
    config: Config
    trained: Counter[SampleId]
    trained_prompts: Counter[tuple[int, int]]
    contents: dict[int, int]


class SimulatedLearner:
    """One process."""

    def __init__(self, simulation: Simulation, number: int, checkpoint: Checkpoint | None) -> None:
        self.simulation, self.learner_id = simulation, f"learner-{number}"
        self.alive, self.done = True, False
        self.stopped_until_s = 0.0
        self.config = config = simulation.config_of(number)
        self.stream = simulation.stream()
        self.version, ledger = 0, Ledger()
        history: wire.History = ()
        self.trained: Counter[SampleId] = Counter()
        self.trained_prompts: Counter[tuple[int, int]] = Counter()
        self.contents = {0: 0}  # version to the id of its weights
        if checkpoint is not None:
            self.stream.restore(checkpoint.stream)
            prompts = {g.group_id: self.stream.prompt(g.epoch, g.item_index) for g in checkpoint.ledger.groups}
            ledger = ledger_of(checkpoint.ledger, prompts, checkpoint.trajectories)
            self.version, self.contents = checkpoint.version, dict(checkpoint.contents)
            give_back = self.stream.give_back
            refit(ledger, before=checkpoint.config, now=config, policy_version=self.version, give_back=give_back)
            history = checkpoint.history
            self.trained, self.trained_prompts = Counter(checkpoint.trained), Counter(checkpoint.trained_prompts)
        self.offers = Offers(
            together=simulation.schedule.together, timeout_s=_OFFER_TIMEOUT_S, call_timeout_s=2 * HEARTBEAT_S
        )
        self.records: list[object] = []
        sets = [EvalSet("held-out", [_EVAL_PROMPT] * 2)] if simulation.schedule.evaluates else []
        self.evaluation = Evaluation(sets, self.records.append)
        self.intake = Intake(
            config,
            ledger=ledger,
            stream=self.stream,
            evaluation=self.evaluation,
            offers=self.offers,
            policy_version=self.version,
            history=(*history, (self.learner_id, self.version)),
            lies=Lies(config, vocab_size=10**6),  # tokens are ids of weights
        )
        self._met: set[str] = set()
        self._counted = FleetStatistics(num_workers=0, silent_s={}, refused_workers={}, set_aside=0)
        self._batch: list[Group] | None = None
        self._commits_by_s: float | None = None  # a step waits for partial rollouts, until then at most
        self._begun: dict[int, wire.WeightsNotice] = {}  # by offer id
        self._timer_s = float("inf")
        self._commit()
        self._tick()

    # -- events --------------------------------------------------------------------------------------------------------

    def deliver(self, peer: str, message: wire.WorkerMessage) -> None:
        if not self.alive:
            return
        if self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, lambda: self.deliver(peer, message))
            return
        outgoing = self.intake.handle(peer, message, self.simulation.clock.now_s)
        grants = not isinstance(message, wire.Heartbeat) and not self.intake.draining  # else not before the next tick
        if grants and (missed := missed_leases(self.intake._leasing, self.version, self.offers.newest_version)):
            raise ViolationError(f"after {type(message).__name__}: {'; '.join(missed)}")
        self._after(outgoing)

    def disconnected(self, peer: str) -> None:
        if self.alive and self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, lambda: self.disconnected(peer))
        elif self.alive:
            self.intake.disconnected(peer, self.simulation.clock.now_s)

    def has_met(self, worker_id: str) -> bool:
        return worker_id in self._met

    def duties_of(self, peer: str) -> frozenset[Duty]:
        """Return the duties of a worker; none for a stranger."""
        worker = self.intake.fleet.at(peer)
        return frozenset() if worker is None else frozenset(worker.duties)

    def check_leased_again(self, lost: frozenset[Duty]) -> None:
        """Check that no sample of a dead worker waits while another worker has room.

        The last attempt of a sample is another worker's, and waits for this worker.
        """
        have_room = {worker.worker_id for worker in self.intake.fleet.alive.values() if worker.free_samples > 0}
        if self.intake.draining:
            return
        for duty in lost:
            sample = self.intake._leasing.sample(duty.sample_id)
            if sample is None or sample.trajectories or sample.worker_id is not None:
                continue
            is_last = sample.leases and sample.num_attempts == self.config.wire.max_attempts - 1
            if have_room - ({sample.leases[-1].worker_id} if is_last else set()):
                raise ViolationError(f"{duty} of a dead worker waits, although another worker has room")

    def check_begun_again(self, lost: frozenset[Duty]) -> int:
        """Check that the samples leased again have arrived at the workers; return their number."""
        workers = {worker.name: worker for worker in self.simulation.workers.values()}
        num_begun = 0
        for duty in lost:
            sample = self.intake._leasing.sample(duty.sample_id)
            if sample is None or sample.trajectories:
                num_begun += 1
            elif sample.worker_id is not None:
                if self.intake.fleet.alive[sample.worker_id].peer != workers[sample.worker_id].peer:
                    continue  # this worker has died, too, and its own time to be forgotten is not over
                if not workers[sample.worker_id].has(Duty(sample.leases[-1].lease_id, *duty.sample_id)):
                    raise ViolationError(f"{duty} of a dead worker is leased again, and has not begun")
                num_begun += 1
        return num_begun

    def _tick(self) -> None:
        if self.alive:
            if not self._is_stopped():
                self._after(self.intake.tick(self.simulation.clock.now_s))
            self.simulation.clock.after(_TICK_S, self._tick)

    def _is_stopped(self) -> bool:
        return self.simulation.clock.now_s < self.stopped_until_s

    def _after(self, outgoing: list[Outgoing]) -> None:
        """Do what the service does after every event: send, look at the offers, take the next batch if there is one."""
        self._send(outgoing)
        self._commit_if_told()
        self._take_batch()
        self._carry_out()
        self.check()

    def _send(self, outgoing: list[Outgoing]) -> None:
        for peer, message in outgoing:
            self.simulation.to_worker(peer, message)

    # -- training ------------------------------------------------------------------------------------------------------

    def _take_batch(self) -> None:
        if self._batch is not None or self.done:
            return
        if self.version == self.config.learner.num_train_steps:
            if self.evaluation.finished:
                self.done = True
                self._send(self.intake.stop())
            return
        self._batch = self.intake.take_batch()
        if self._batch is None:
            self._send(self.intake.grants())
            self._batch = self.intake.take_batch()
        if self._batch is not None:
            self.simulation.story.tell(
                "step at version %d takes groups %s", self.version, [g.group_id for g in self._batch]
            )
            self._check_batch(self._batch)
            self.simulation.clock.after(self.simulation.draw.uniform(0.05, 0.5), self._train)

    def _train(self) -> None:
        if not self.alive:
            return
        if self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, self._train)
            return
        self._commits_by_s = self.simulation.clock.now_s + _PARTIALS_S
        self._after(self.intake.call_for_partials())

    def _commit_if_told(self) -> None:
        """Commit when the partial rollouts for the checkpoint have come, or it takes too long."""
        told = self.intake.has_partials or self.simulation.clock.now_s >= (self._commits_by_s or 0.0)
        if self._batch is None or self._commits_by_s is None or not told:
            return
        for group in self._batch:
            self.trained.update({trajectory.sample_id for trajectory in group.trajectories})
            self.trained_prompts[group.epoch, group.item_index] += 1
        self._batch = self._commits_by_s = None
        self.version += 1
        self.contents[self.version] = self.simulation.new_content()
        self._commit()

    def _commit(self) -> None:
        is_last = self.version == self.config.learner.num_train_steps
        evaluate = self.version % 2 == 0
        due = evaluate or self.version % self.config.weights.publish_every_n_steps == 0
        publish = due or self.offers.newest_version < 0  # at the start
        if publish:
            self.offers.publish(self.version)
        outgoing = self.intake.commit(self.version, evaluate=evaluate, published=publish)
        if self.version and not is_last:
            self._save()
        self._after(outgoing)

    def _save(self) -> None:
        """Capture the state between two steps; the disk has it later, unless it refuses or the learner is killed."""
        ledger = self.intake.ledger
        buffered = {(g.group_id, i): s.trajectories for g in ledger.groups.values() for i, s in g.samples.items()}
        checkpoint = Checkpoint(
            self.version,
            self.intake.history,
            ledger_state(ledger),
            {sample_id: trajectories for sample_id, trajectories in buffered.items() if trajectories},
            self.stream.state(),
            self.config,
            Counter(self.trained),
            Counter(self.trained_prompts),
            dict(self.contents),
        )

        def written() -> None:
            if self.alive and not self.simulation.is_on("full_disk", None):
                self.simulation.checkpoint = checkpoint

        self.simulation.clock.after(self.simulation.draw.uniform(0.0, 1.0), written)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Do what the broadcaster does with the commands of the offers."""
        clock = self.simulation.clock
        for command in self.offers.poll(clock.now_s):
            match command:
                case Call():
                    for worker_id in command.workers:
                        self._send_to(worker_id, wire.WeightsCall(self.learner_id, command.offer_id))
                case Begin():
                    clock.after(self.simulation.draw.uniform(0.0, 0.05), lambda begin=command: self._begin(begin))
                case Repeat():
                    if command.offer_id in self._begun:
                        self._send_to(command.worker_id, self._begun[command.offer_id])
        due_s = self.offers.due_s()
        if due_s < float("inf") and (due_s < self._timer_s or self._timer_s <= clock.now_s):
            self._timer_s = due_s
            clock.at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        if self.alive and self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, self._on_timer)
        elif self.alive:
            self._timer_s = float("inf")
            self._carry_out()

    def _begin(self, begin: Begin) -> None:
        if not self.alive:
            return
        now_s = self.simulation.clock.now_s
        if self.simulation.is_on("no_descriptors", None):
            self.offers.broken(begin.offer_id, "no descriptor is left", now_s)
            self.offers.sent(begin.offer_id)
            self._carry_out()
            return
        content = self.contents[begin.policy_version]
        notice = wire.WeightsNotice(self.learner_id, begin.offer_id, begin.policy_version, str(content).encode())
        self._begun[begin.offer_id] = notice
        self.offers.begun(begin.offer_id, content)
        for worker_id in begin.workers:
            self._send_to(worker_id, notice)
        if self.simulation.schedule.together:
            self.simulation.begin_collective(self, begin.offer_id, begin.workers, _OFFER_TIMEOUT_S)
        else:
            self.offers.sent(begin.offer_id)

    def end_collective(self, offer_id: int, *, is_whole: bool) -> None:
        if self.alive:
            if not is_whole:
                self.offers.broken(offer_id, "a rank did not take part", self.simulation.clock.now_s)
            self.offers.sent(offer_id)
            self._carry_out()

    def _send_to(self, worker_id: str, message: wire.LearnerMessage) -> None:
        if (worker := self.intake.fleet.alive.get(worker_id)) is not None:
            self.simulation.to_worker(worker.peer, message)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the ledger, the admission and who holds what."""
        ledger, fleet = self.intake.ledger, self.intake.fleet
        self._met |= fleet.alive.keys()
        self._count(fleet.statistics(0.0))
        if lies := self.intake.lies.statistics().refused_answers:
            raise ViolationError(f"an honest worker is taken for a liar: {lies}")
        if any(sample.num_attempts < 0 for group in ledger.groups.values() for sample in group.samples.values()):
            raise ViolationError("a checkpoint with a negative number of attempts cannot be read")
        if found := differences(ledger, self.intake.buffer, self.intake._leasing):
            raise ViolationError("; ".join(found))
        counts = ledger.counts()
        if not counts.balanced or counts.trained != self.trained.total():
            raise ViolationError(f"trained {self.trained.total()}, and the ledger says {counts}")
        live, learner, algorithm = len(ledger.groups), self.config.learner, self.config.algorithm
        if live > (min(algorithm.max_staleness, algorithm.pipeline_depth) + 1) * learner.groups_per_step:
            raise ViolationError(f"{live} groups are live at version {self.version}")
        held = {
            (sample.worker_id, sample.leases[-1].lease_id, group.group_id, index)
            for group in ledger.groups.values()
            for index, sample in group.samples.items()
            if sample.worker_id is not None
        }
        known = {(w.worker_id, *duty) for w in fleet.alive.values() for duty in w.duties if duty.group_id >= 0}
        if held != known:
            raise ViolationError(f"the ledger has {sorted(held - known)} and the fleet {sorted(known - held)} alone")
        if len(known) != sum(worker.num_train for worker in fleet.alive.values()):
            raise ViolationError(f"the workers have {len(known)} train samples, and their counts differ")

    def _count(self, statistics: FleetStatistics) -> None:
        """Add this learner's new counts to those of the simulation, which several learners share."""
        simulation, before = self.simulation, self._counted
        simulation.num_set_aside += statistics.set_aside - before.set_aside
        simulation.num_refused += sum(statistics.refused_workers.values()) - sum(before.refused_workers.values())
        self._counted = statistics

    def _check_batch(self, batch: list[Group]) -> None:
        eta, policy = self.config.algorithm.max_staleness, self.config.algorithm.stale_tokens
        _demand(len(batch) == self.config.learner.groups_per_step, f"a batch has {len(batch)} groups")
        versions = np.concatenate([t.completion.versions for group in batch for t in group.trajectories])
        fresh = within_bound(versions, policy_version=self.version, max_staleness=eta)
        _demand(bool(fresh.any()), f"the step at version {self.version} trains on nothing")
        for group in batch:
            prompt = self.intake.ledger.groups[group.group_id].prompt
            for trajectory in group.trajectories:
                name, completion = trajectory.sample_id, trajectory.completion
                _demand(name not in self.trained, f"sample {name} is trained on again")
                _demand(tuple(trajectory.prompt_tokens) == prompt.tokens, f"sample {name} has another prompt")
                fresh = within_bound(completion.versions, policy_version=self.version, max_staleness=eta)
                _demand(
                    policy == "mask" or bool(fresh.all()), f"{completion.versions} at {self.version} under {policy}"
                )
                for version, content in zip(completion.versions.tolist(), completion.tokens.tolist(), strict=True):
                    right = self.contents.get(version)
                    _demand(right == content, f"sample {name}: a token of version {version} is of weights {content}")
            place = (group.epoch, group.item_index)
            _demand(place not in self.trained_prompts, f"prompt {place} is trained on again")


def _demand(holds: bool, words: str) -> None:
    if not holds:
        raise ViolationError(words)
