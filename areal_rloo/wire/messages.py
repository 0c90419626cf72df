"""The whole protocol: every message between the learner (ROUTER) and a rollout worker (DEALER).

    worker                                   learner
    Hello (capacity, held samples)      ─►   register the worker, reconcile the ledger
                                        ◄─   Welcome
                                        ◄─   Leases              whenever admission and the capacity allow
    TrajectoryBatch (all that is ready) ─►   ledger
                                        ◄─   TrajectoryAck       the worker may forget them
    SampleFailed                        ─►   ledger: dropped with a reason
    Heartbeat                           ─►
                                        ◄─   HeartbeatReply      how many Leases were sent: a gap means some were lost
                                        ◄─   WeightsNotice       opaque to the wire; the weights package reads it
    WeightsReceived | WeightsFailed     ─►
                                        ◄─   Abort               samples to discard
                                        ◄─   Drain               push finished samples, say Goodbye
    Goodbye                             ─►

No side waits for an answer in lock step. Every message can come twice, and some can be lost with a connection: the
learner acknowledges and ignores a repeated trajectory, the worker sends unacknowledged trajectories again, and a gap in
the sequence reveals lost leases.
"""

from __future__ import annotations

import msgspec

from areal_rloo.trajectory import Item, Purpose, SampleId, Trajectory, purpose_of

WIRE_VERSION = 4


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The right and duty to generate `sample_indices` of a group, granted by the learner's intake to a worker."""

    group_id: int
    sample_indices: tuple[int, ...]  # all at first, the missing ones after a loss
    prompt_tokens: tuple[int, ...]
    item: Item  # as rewards need it
    min_version: int  # oldest policy version that may start the generation
    seed: int  # sample i has seed + i

    @property
    def purpose(self) -> Purpose:
        return purpose_of(self.group_id)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Worker to learner: at the start, after a gap in the leases, and after a restart of the engine."""

    worker_id: str  # stable over restarts of the worker, e.g. `rollout-0`
    incarnation: str  # differs at every start of the process
    capacity_samples: int  # unfinished train samples the worker accepts; evaluation samples come on top
    policy_version: int | None  # of the weights in the engine; None while the engine starts
    held: tuple[SampleId, ...]  # running or unacknowledged; all other samples leased to this worker are lost


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Worker to learner, every `wire.heartbeat_s`."""

    worker_id: str
    policy_version: int | None  # as in Hello
    idle_s: float  # without work since the engine started
    generated_tokens: int  # sampled since the engine started


class TrajectoryBatch(msgspec.Struct, frozen=True):
    """Worker to learner: all ready trajectories. `batch_id` counts per worker incarnation.

    The codec encodes the arrays as columns of raw little-endian numbers.
    """

    worker_id: str
    batch_id: int
    trajectories: tuple[Trajectory, ...]


class SampleFailed(msgspec.Struct, frozen=True, tag="sample_failed"):
    """Worker to learner: this sample will never be finished (a reward that raised, an episode that failed).

    The first line of `detail` names the failure; a traceback may follow. `completion` is the text so far.
    """

    worker_id: str
    group_id: int
    sample_index: int
    reason: str
    detail: str
    completion: str


class WeightsReceived(msgspec.Struct, frozen=True, tag="weights_received"):
    """Worker to learner: the engine runs this version, and the received bytes had this checksum."""

    worker_id: str
    policy_version: int
    checksum: int


class WeightsFailed(msgspec.Struct, frozen=True, tag="weights_failed"):
    """Worker to learner: this broadcast did not arrive whole; the engine does not run it."""

    worker_id: str
    policy_version: int
    detail: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Worker to learner: the worker holds no sample and stops."""

    worker_id: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Learner to worker: the answer to a Hello. `learner_id` differs at every start of the learner."""

    learner_id: str
    policy_version: int


class Leases(msgspec.Struct, frozen=True, tag="leases"):
    """Learner to worker: start all of these together. `sequence` counts the Leases sent to this worker, from 1."""

    sequence: int
    leases: tuple[Lease, ...]


class TrajectoryAck(msgspec.Struct, frozen=True, tag="trajectory_ack"):
    """Learner to worker: the trajectories of these batches are in the ledger."""

    batch_ids: tuple[int, ...]


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heartbeat_reply"):
    """Learner to worker. `lease_sequence` is that of the last Leases sent since the Hello; -1: say Hello."""

    learner_id: str
    policy_version: int
    lease_sequence: int


class WeightsNotice(msgspec.Struct, frozen=True, tag="weights_notice"):
    """Learner to worker: a version is on offer. Only `areal_rloo.weights` encodes and reads `body`."""

    policy_version: int
    body: bytes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Learner to worker: cancel these samples and discard the results."""

    sample_ids: tuple[SampleId, ...]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Learner to worker: cancel running samples, push finished ones, say Goodbye, stop."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Learner to worker: a message was unreadable or not allowed; `detail` says why and how to mend this."""

    detail: str


PlainWorkerMessage = Hello | Heartbeat | SampleFailed | WeightsReceived | WeightsFailed | Goodbye  # without columns
WorkerMessage = PlainWorkerMessage | TrajectoryBatch
LearnerMessage = Welcome | Leases | TrajectoryAck | HeartbeatReply | WeightsNotice | Abort | Drain | Refusal
