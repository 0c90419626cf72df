"""The protocol, whole: every message between the learner (ROUTER) and a rollout worker (DEALER).

    worker                                   learner
    Hello (capacity, what it holds)     ─►   registers it, reconciles the ledger
                                        ◄─   Welcome
                                        ◄─   Leases              whenever admission and the capacity allow
    TrajectoryBatch (what is ready)     ─►   ledger
                                        ◄─   TrajectoryAck       the worker may forget them
    SampleFailed                        ─►   ledger: dropped with a reason
    Heartbeat                           ─►
                                        ◄─   HeartbeatReply      how many Leases were sent: a gap means some were lost
                                        ◄─   WeightsNotice       opaque to the wire; the weights package reads it
    WeightsReceived | WeightsFailed     ─►
                                        ◄─   Abort               samples nobody wants any more
                                        ◄─   Drain               finish what runs, push it, say Goodbye
    Goodbye                             ─►

Nobody waits for an answer in lock step. Every message can come twice, and some can be lost with a connection: a
repeated trajectory is acknowledged and ignored, an unacknowledged one is sent again, a lost lease is found by its
missing number.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_rloo.trajectory import Item, SampleId, Trajectory

WIRE_VERSION = 3

Purpose = Literal["train", "eval"]


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The right and duty to generate `sample_indices` of one group. Made by the learner's intake for one worker.

    Attributes:
        group_id: names the group; evaluation groups have negative ids.
        sample_indices: which samples of the group; all of them at first, the missing ones after a loss.
        prompt_tokens: token ids of the prompt.
        item: what the prompt is made of, and what its completions are worth.
        purpose: evaluation is sampled as its set says, pinned to one version, and is outside the ledger.
        min_version: generation starts with the weights of this policy version or a newer one.
        seed: seeds sample i of the group with `seed + i`.
    """

    group_id: int
    sample_indices: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    item: Item
    purpose: Purpose
    min_version: int
    seed: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Worker to learner, at every start and reconnection.

    Attributes:
        worker_id: stable over restarts of the worker, e.g. `rollout-0`.
        incarnation: differs at every start of the process.
        capacity_samples: how many unfinished samples the worker wants to hold, train and eval together.
        policy_version: version of the weights its engine runs; None while it can take none, for it is being started.
        held: samples it holds or has not had acknowledged; others the learner leased to it are lost.
    """

    worker_id: str
    incarnation: str
    capacity_samples: int
    policy_version: int | None
    held: tuple[SampleId, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Worker to learner, every `wire.heartbeat_s`. Times are seconds since the engine's start, counts likewise.

    `policy_version` as in Hello.
    """

    worker_id: str
    policy_version: int | None
    idle_s: float
    elapsed_s: float
    generated_tokens: int
    num_running: int
    num_waiting: int


class TrajectoryBatch(msgspec.Struct, frozen=True):
    """Worker to learner: whatever is ready, in one message. `batch_id` counts per worker incarnation.

    Encoded by the codec: the arrays travel as columns of raw little-endian numbers.
    """

    worker_id: str
    batch_id: int
    trajectories: tuple[Trajectory, ...]


class SampleFailed(msgspec.Struct, frozen=True, tag="sample_failed"):
    """Worker to learner: this sample will never be finished (a reward that raised, an episode that failed).

    The first line of `detail` says what happened, a traceback may stand below it; `completion` is the text there was.
    """

    worker_id: str
    group_id: int
    sample_index: int
    reason: str
    detail: str
    completion: str


class WeightsReceived(msgspec.Struct, frozen=True, tag="weights_received"):
    """Worker to learner: its engine runs this version, and the bytes had this checksum."""

    worker_id: str
    policy_version: int
    checksum: int


class WeightsFailed(msgspec.Struct, frozen=True, tag="weights_failed"):
    """Worker to learner: this broadcast did not arrive whole; its engine keeps the weights it had."""

    worker_id: str
    policy_version: int
    detail: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Worker to learner: it holds nothing any more and stops."""

    worker_id: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Learner to worker, in answer to every Hello. `learner_id` differs at every start of the learner."""

    learner_id: str
    policy_version: int


class Leases(msgspec.Struct, frozen=True, tag="leases"):
    """Learner to worker: start on all of these together. `sequence` counts the Leases sent to this worker from 1."""

    sequence: int
    leases: tuple[Lease, ...]


class TrajectoryAck(msgspec.Struct, frozen=True, tag="trajectory_ack"):
    """Learner to worker: the trajectories of these batches are in the ledger."""

    batch_ids: tuple[int, ...]


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heartbeat_reply"):
    """Learner to worker. `lease_sequence` is that of the last Leases sent to this worker since its Hello."""

    learner_id: str
    policy_version: int
    lease_sequence: int


class WeightsNotice(msgspec.Struct, frozen=True, tag="weights_notice"):
    """Learner to worker: a version is on offer. `body` is encoded and read by `areal_rloo.weights` alone."""

    policy_version: int
    body: bytes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Learner to worker: stop these samples and send nothing for them."""

    sample_ids: tuple[SampleId, ...]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Learner to worker: finish what runs, or drop it with `abort_running`, push what is done, say Goodbye, stop."""

    abort_running: bool


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Learner to worker: a message of yours could not be read or was not allowed; says why and what to do."""

    detail: str


WorkerMessage = Hello | Heartbeat | TrajectoryBatch | SampleFailed | WeightsReceived | WeightsFailed | Goodbye
LearnerMessage = Welcome | Leases | TrajectoryAck | HeartbeatReply | WeightsNotice | Abort | Drain | Refusal
