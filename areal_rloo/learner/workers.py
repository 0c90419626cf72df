"""The rollout workers as the learner knows them: what each holds, when it was last heard, how much it idled."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_rloo.trajectory import SampleId
from areal_rloo.wire.messages import Heartbeat, Hello, Lease, Leases


@dataclass(slots=True)
class Worker:
    """One rollout worker.

    `held` are the samples leased to it that have not come back, evaluation included; `joined_version` is the learner's
    version when it said Hello: it starts on nothing before it runs that version.
    """

    worker_id: str
    incarnation: str
    peer: str
    capacity_samples: int
    last_heard_s: float
    policy_version: int | None  # None: its engine is being started
    held: set[SampleId] = field(default_factory=set)
    held_train: int = 0
    joined_version: int = 0
    lease_sequence: int = 0
    idle_s: float = 0.0
    generated_tokens: int = 0

    @property
    def free_samples(self) -> int:
        return self.capacity_samples - self.held_train

    def take(self, leases: list[Lease]) -> Leases:
        """Write leases to its account, as the message that brings them to it."""
        for lease in leases:
            samples = {(lease.group_id, index) for index in lease.sample_indices}
            self.held |= samples
            self.held_train += len(samples) if lease.purpose == "train" else 0
        self.lease_sequence += 1
        return Leases(self.lease_sequence, tuple(leases))

    def release(self, sample_id: SampleId) -> None:
        """It no longer holds this sample."""
        if sample_id in self.held:
            self.held.discard(sample_id)
            self.held_train -= sample_id[0] >= 0


class Workers:
    """All that said Hello and were heard since; totals outlive them."""

    def __init__(self) -> None:
        self.alive: dict[str, Worker] = {}
        self._met: set[str] = set()
        self._idle_before_s = 0.0
        self._generated_before = 0

    def welcome(self, hello: Hello, peer: str, *, now_s: float, policy_version: int) -> tuple[Worker, set[SampleId]]:
        """Register a worker; also the samples its account held that it says it does not hold."""
        self._met.add(peer)
        worker = self.alive.get(hello.worker_id)
        lost: set[SampleId] = set()
        if worker is not None and worker.incarnation != hello.incarnation:
            lost = self.bury(hello.worker_id)
            worker = None
        if worker is None:
            worker = Worker(
                hello.worker_id, hello.incarnation, peer, hello.capacity_samples, now_s, hello.policy_version
            )
            worker.joined_version = policy_version
            self.alive[hello.worker_id] = worker
        for sample_id in worker.held - set(hello.held):
            worker.release(sample_id)
            lost.add(sample_id)
        worker.peer, worker.last_heard_s, worker.lease_sequence = peer, now_s, 0
        worker.policy_version = hello.policy_version
        return worker, lost

    def has_met(self, peer: str) -> bool:
        """Whether this peer ever said Hello, also if it was taken for dead since."""
        return peer in self._met

    def heard(self, heartbeat: Heartbeat, now_s: float) -> Worker | None:
        """Note a sign of life; None if this worker has to say Hello first."""
        worker = self.alive.get(heartbeat.worker_id)
        if worker is not None:
            worker.last_heard_s = now_s
            worker.policy_version = heartbeat.policy_version
            worker.idle_s = heartbeat.idle_s
            worker.generated_tokens = heartbeat.generated_tokens
        return worker

    def bury(self, worker_id: str) -> set[SampleId]:
        """Forget a worker that is gone; gives back the samples it held."""
        worker = self.alive.pop(worker_id)
        self._idle_before_s += worker.idle_s
        self._generated_before += worker.generated_tokens
        return worker.held

    def silent(self, now_s: float, timeout_s: float) -> list[str]:
        """Those not heard for longer than the timeout."""
        return [w.worker_id for w in self.alive.values() if now_s - w.last_heard_s > timeout_s]

    @property
    def idle_s(self) -> float:
        """Seconds without anything to generate, summed over workers and incarnations."""
        return self._idle_before_s + sum(worker.idle_s for worker in self.alive.values())

    @property
    def generated_tokens(self) -> int:
        return self._generated_before + sum(worker.generated_tokens for worker in self.alive.values())
