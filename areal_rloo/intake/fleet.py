"""The rollout workers as the learner knows them: the samples each holds, the last sign of life, the idle time."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_rloo.trajectory import SampleId, purpose_of
from areal_rloo.wire.messages import Heartbeat, Hello, Lease, Leases


@dataclass(slots=True)
class Worker:
    """A rollout worker that said Hello and is alive. Fields without a comment are those of its last message."""

    worker_id: str
    incarnation: str
    peer: str  # address of the worker on the wire
    capacity_samples: int
    last_heard_s: float  # monotonic time of the last Hello or heartbeat
    policy_version: int | None
    joined_version: int  # of the learner at the Hello; the worker starts no sample with older weights
    held: set[SampleId] = field(default_factory=set)  # leased to the worker and not returned, evaluation included
    held_train: int = 0  # number of train samples in `held`
    lease_sequence: int = 0  # number of Leases messages sent since the Hello
    idle_s: float = 0.0
    generated_tokens: int = 0

    @property
    def free_samples(self) -> int:
        return self.capacity_samples - self.held_train

    def take(self, leases: list[Lease]) -> Leases:
        """Record leases for this worker; returns the message to send."""
        for lease in leases:
            samples = {(lease.group_id, index) for index in lease.sample_indices}
            self.held |= samples
            self.held_train += len(samples) if lease.purpose == "train" else 0
        self.lease_sequence += 1
        return Leases(self.lease_sequence, tuple(leases))

    def release(self, sample_id: SampleId) -> None:
        """Remove a sample from this worker's account; ignore a sample the worker does not hold."""
        if sample_id in self.held:
            self.held.discard(sample_id)
            self.held_train -= purpose_of(sample_id[0]) == "train"


class Fleet:
    """All workers that said Hello and were heard since. Totals include departed workers."""

    def __init__(self) -> None:
        self.alive: dict[str, Worker] = {}
        self._met: set[str] = set()
        self._idle_before_s = 0.0
        self._generated_before = 0

    def welcome(self, hello: Hello, peer: str, *, now_s: float, policy_version: int) -> tuple[Worker, set[SampleId]]:
        """Register a worker.

        Returns:
            The worker, and the samples leased to it and missing in its Hello.
        """
        self._met.add(peer)
        worker = self.alive.get(hello.worker_id)
        lost: set[SampleId] = set()
        if worker is not None and worker.incarnation != hello.incarnation:
            lost = self.remove(hello.worker_id)
            worker = None
        if worker is None:
            name, capacity, version = hello.worker_id, hello.capacity_samples, hello.policy_version
            worker = Worker(name, hello.incarnation, peer, capacity, now_s, version, joined_version=policy_version)
            self.alive[name] = worker
        for sample_id in worker.held - set(hello.held):
            worker.release(sample_id)
            lost.add(sample_id)
        worker.peer, worker.last_heard_s, worker.lease_sequence = peer, now_s, 0
        worker.policy_version = hello.policy_version
        return worker, lost

    def has_met(self, peer: str) -> bool:
        """Return True if this peer ever said Hello, even if the worker was removed since."""
        return peer in self._met

    def heard(self, heartbeat: Heartbeat, now_s: float) -> Worker | None:
        """Record a heartbeat; returns None if the worker must say Hello first."""
        worker = self.alive.get(heartbeat.worker_id)
        if worker is not None:
            worker.last_heard_s = now_s
            worker.policy_version = heartbeat.policy_version
            worker.idle_s = heartbeat.idle_s
            worker.generated_tokens = heartbeat.generated_tokens
        return worker

    def remove(self, worker_id: str) -> set[SampleId]:
        """Forget a departed worker; returns the samples the worker held."""
        worker = self.alive.pop(worker_id)
        self._idle_before_s += worker.idle_s
        self._generated_before += worker.generated_tokens
        return worker.held

    def silent(self, now_s: float, timeout_s: float) -> list[str]:
        """List the workers not heard for longer than the timeout."""
        return [w.worker_id for w in self.alive.values() if now_s - w.last_heard_s > timeout_s]

    @property
    def idle_s(self) -> float:
        """Seconds without work, summed over workers and incarnations."""
        return self._idle_before_s + sum(worker.idle_s for worker in self.alive.values())

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled, summed over workers and incarnations."""
        return self._generated_before + sum(worker.generated_tokens for worker in self.alive.values())
