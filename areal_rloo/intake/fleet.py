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
    """All workers that said Hello and were heard since; the heartbeats of departed workers, too."""

    def __init__(self) -> None:
        self.alive: dict[str, Worker] = {}
        self.met: set[str] = set()  # peers that ever said Hello, even if the worker was removed since
        self.heartbeats: dict[tuple[str, str], Heartbeat] = {}  # the last of each incarnation of each worker

    def welcome(self, hello: Hello, peer: str, *, now_s: float, policy_version: int) -> tuple[Worker, set[SampleId]]:
        """Register a worker; returns the worker and its lost samples: of an earlier process, or not in the Hello."""
        self.met.add(peer)
        worker = self.alive.get(hello.worker_id)
        lost: set[SampleId] = set()
        if worker is None or worker.incarnation != hello.incarnation:
            lost = worker.held if worker is not None else lost
            name, capacity, version = hello.worker_id, hello.capacity_samples, hello.policy_version
            worker = Worker(name, hello.incarnation, peer, capacity, now_s, version, joined_version=policy_version)
            self.alive[name] = worker
        for sample_id in worker.held - set(hello.held):
            worker.release(sample_id)
            lost.add(sample_id)
        worker.peer, worker.last_heard_s, worker.lease_sequence = peer, now_s, 0
        worker.policy_version = hello.policy_version
        return worker, lost

    def heard(self, heartbeat: Heartbeat, now_s: float) -> Worker | None:
        """Record a heartbeat; returns None if the worker must say Hello first."""
        worker = self.alive.get(heartbeat.worker_id)
        if worker is not None:
            worker.last_heard_s, worker.policy_version = now_s, heartbeat.policy_version
            self.heartbeats[worker.worker_id, worker.incarnation] = heartbeat
        return worker

    def release(self, worker_id: str, sample_id: SampleId) -> None:
        """Record that a worker, if it is still alive, holds this sample no more."""
        if (worker := self.alive.get(worker_id)) is not None:
            worker.release(sample_id)
