"""The whole protocol: every message between the learner (ROUTER) and a rollout worker (DEALER).

    worker                                   learner
    Hello (capacity, duties)            ─►   register the worker, reconcile the ledger with the duties
                                        ◄─   Welcome
                                        ◄─   Leases              whenever admission and the capacity allow
    Results (all that is ready)         ─►   ledger
                                        ◄─   Ack                 the worker may forget the message
                                        ◄─   PartialsCall        before a checkpoint
    Partials                            ─►   ledger
    Heartbeat (digest of the duties)    ─►
                                        ◄─   HeartbeatReply      newest lease; asks for a Hello if the digests differ
                                        ◄─   WeightsCall         before a collective: who takes part?
    WeightsReady                        ─►
                                        ◄─   WeightsNotice       opaque to the wire; the weights package reads the body
    WeightsReceived | WeightsFailed     ─►
                                        ◄─   Abort               duties to discard
                                        ◄─   Drain               push finished samples, say Goodbye
    Goodbye                             ─►

No side waits for an answer in lock step, and every message can be lost, delayed or repeated:

- A message that must arrive has a `number` that the worker never uses again. The worker keeps the message until the
  learner acknowledges the number, and sends it again if the reply to a later heartbeat comes first.
- The learner never uses the id of a lease again. A *duty* is a sample under a lease, so an answer to an old lease is no
  answer to a later lease of the same sample. A worker ignores leases up to the newest lease it has seen.
- Everything about leases carries the `learner_id`, because the ids of an earlier learner mean other samples.
- A PartialsCall and its answer may be lost: then a checkpoint has older partial rollouts, or none.
- If the two ends disagree about the duties, the digest of the next heartbeat differs, and a Hello settles the matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from areal_rloo.trajectory import Item, Purpose, SampleId, Trajectory, purpose_of
from areal_rloo.wire.columns import MOST_TOKENS, Extremes

WIRE_VERSION = 13

# The codec refuses other values: sums of many stay exact, and a peer's text cannot grow without end.
MOST_COUNT, MOST_SECONDS = 2**53, 1e12
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
GroupId = Annotated[int, Meta(ge=-(2**43), lt=2**43)]  # seeds are 2**20 apart
SampleIndex = Annotated[int, Meta(ge=0, lt=2**20)]
Version = Annotated[int, Meta(ge=0, lt=2**31)]
EngineVersion = Annotated[int, Meta(ge=-1, lt=2**31)]  # -1: a server that was found has unknown weights
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,250}\Z")]
Reason = Annotated[str, Meta(pattern=r"\A[a-z_]{1,40}\Z")]
Text = Annotated[str, Meta(max_length=5000)]  # see `errors.shortened`; a record of each is kept

# A duty of 4 bytes takes up to 180 bytes of memory, and msgspec reads all values before our other checks. So each
# collection has a bound far above an honest peer's. Bytes need none: they take no more memory than in the message.
MOST_DUTIES = 2**18  # of a worker: an evaluation leases all samples together
MOST_PARTIALS = 32  # of a message: the check of each may hold the learner's loop for 20 ms, however small it is
SampleIndices = Annotated[tuple[SampleIndex, ...], Meta(max_length=MOST_DUTIES)]
Digest = Annotated[bytes, Meta(max_length=64)]


class Duty(NamedTuple):
    """A sample under a lease. The same sample under a later lease is another duty."""

    lease_id: Count
    group_id: GroupId
    sample_index: SampleIndex

    @property
    def sample_id(self) -> SampleId:
        return self.group_id, self.sample_index

    @property
    def purpose(self) -> Purpose:
        return purpose_of(self.group_id)


Duties = Annotated[tuple[Duty, ...], Meta(max_length=MOST_DUTIES)]


def digest(duties: Iterable[Duty]) -> bytes:
    """Return a digest of a set of duties, equal on every machine."""
    return hashlib.blake2b(msgspec.msgpack.encode(sorted(duties)), digest_size=8).digest()


History = Annotated[tuple[tuple[Name, Version], ...], Meta(max_length=2**16)]  # a pair for each start of a learner
"""Pairs of a learner id and the version that this learner began with, the present learner last."""


def is_of(history: History, learner_id: str | None, policy_version: int) -> bool:
    """Return True if the weights that this learner published as this version are the history's version, too.

    Version 0 is the initial model for every learner. None: the publisher is unknown, and nothing speaks against it.
    """
    if policy_version == 0 or learner_id is None:
        return True
    ends = [began for _, began in history[1:]]
    for (name, _), end in zip_longest(history, ends):
        if name == learner_id:
            return end is None or policy_version <= end
    return False


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The right and duty to generate `sample_indices` of a group, granted by the learner's intake to a worker."""

    lease_id: Count  # grows with every lease of a learner
    group_id: GroupId
    sample_indices: SampleIndices  # all at first, the missing ones after a loss
    prompt_tokens: Annotated[tuple[int, ...], Meta(max_length=MOST_TOKENS)]
    item: Item  # as rewards need it
    min_version: Version  # oldest policy version that may start the generation
    seed: int  # sample i has seed + i
    partial: bytes = b""  # of the single sample of this lease: see `Partial`

    @property
    def purpose(self) -> Purpose:
        return purpose_of(self.group_id)

    @property
    def duties(self) -> list[Duty]:
        return [Duty(self.lease_id, self.group_id, index) for index in self.sample_indices]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Counts of a worker's engine since its start."""

    idle_s: Seconds = 0.0  # without work
    generated_tokens: Count = 0
    busy_s: Seconds = 0.0  # with a completion being decoded
    decoding_s: Seconds = 0.0  # in decoding, summed over completions


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Worker to learner: at the start, when the learner asks, and after a restart of the engine."""

    worker_id: Name  # stable over restarts of the worker, e.g. `rollout-0`
    incarnation: Name  # differs at every start of the process
    capacity_samples: SampleIndex  # unfinished train samples the worker accepts; evaluation samples come on top
    policy_version: EngineVersion | None  # of the weights in the engine; None while the engine starts
    learner_id: Name | None  # the learner of the duties; None before the first Welcome
    number: Count
    newest_lease: Count  # highest lease id seen from this learner
    duties: Duties  # running or unacknowledged
    work: Work


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Worker to learner, every `wire.heartbeat_s`."""

    learner_id: Name | None  # as in Hello
    number: Count
    newest_lease: Count  # as in Hello
    duties: Digest  # of the duties without a result on the way
    policy_version: EngineVersion | None  # as in Hello
    newest_offer: Count  # highest id of an offer of weights seen from this learner
    receiving: bool  # True while a version is being received
    work: Work
    num_decoding: Count = 0  # completions; the samples beside them wait for rewards, tools, agents, or a place


class Finished(NamedTuple):
    """The trajectories of a duty: at least one, all of the same sample."""

    lease_id: Count
    trajectories: tuple[Trajectory, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """The worker gives up this duty (a reward raised, an episode failed).

    The first line of `detail` names the failure; a traceback may follow. `completion` is the text so far. `num_tokens`
    are the policy's in all turns, also in the turn that a timeout ended: what is lost depends on the length.
    """

    lease_id: Count
    group_id: GroupId
    sample_index: SampleIndex
    reason: Reason
    detail: Text
    completion: Text
    num_tokens: Count


class Results(msgspec.Struct, frozen=True):
    """Worker to learner: all duties ended since the last Results.

    The codec encodes the arrays of the trajectories as columns of raw little-endian numbers.
    """

    learner_id: Name
    number: Count
    finished: tuple[Finished, ...]
    failed: tuple[Failed, ...] = ()
    extremes: Extremes | None = None  # of all trajectories; the codec's note for the receiver


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """The turns of the policy in an unfinished sample. `turns` are the bytes of `wire.turns`."""

    lease_id: Count
    group_id: GroupId
    sample_index: SampleIndex
    turns: bytes


class Partials(msgspec.Struct, frozen=True, tag="partials"):
    """Worker to learner: an answer to a PartialsCall; the last one has `last`. Also sent before a Goodbye."""

    learner_id: Name
    call_id: Count  # 0 before a Goodbye
    partials: Annotated[tuple[Partial, ...], Meta(max_length=MOST_PARTIALS)]
    last: bool


class WeightsReady(msgspec.Struct, frozen=True, tag="weights_ready"):
    """Worker to learner: the answer to a WeightsCall, sent as soon as no other version is being received."""

    learner_id: Name
    offer_id: Count


class WeightsReceived(msgspec.Struct, frozen=True, tag="weights_received"):
    """Worker to learner: the engine runs the offered version, and the received bytes had this checksum."""

    learner_id: Name
    number: Count
    offer_id: Count
    checksum: int


class WeightsFailed(msgspec.Struct, frozen=True, tag="weights_failed"):
    """Worker to learner: the offered version did not arrive whole; the engine does not run it."""

    learner_id: Name
    number: Count
    offer_id: Count
    detail: Text


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Worker to learner: the worker stops, with all duties given back."""

    learner_id: Name | None
    work: Work
    failed: bool = False  # an error ends the worker, and a sample may be why: no signal, Drain or older learner


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Learner to worker: the answer to the Hello of this number. `learner_id` differs at every start of the learner.

    `history` names the learners of this run up to this one, each with the version it began with. Other weights, of a
    learner that is not named or of versions after the next beginning, belong to a history that was given up.
    """

    learner_id: Name
    number: Count
    history: History


class Leases(msgspec.Struct, frozen=True, tag="leases"):
    """Learner to worker: start all of these together."""

    learner_id: Name
    leases: Annotated[tuple[Lease, ...], Meta(max_length=MOST_DUTIES)]


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Learner to worker: the learner has this message."""

    number: Count


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heartbeat_reply"):
    """Learner to worker. `number` is that of the heartbeat; `newest_lease` that of the last lease sent to the worker.

    With `say_hello`, the learner does not know the worker, or knows other duties.
    """

    learner_id: Name
    number: Count
    newest_lease: Count
    say_hello: bool


class WeightsCall(msgspec.Struct, frozen=True, tag="weights_call"):
    """Learner to worker: a version is about to be sent to all workers together; answer to take part."""

    learner_id: Name
    offer_id: Count


class WeightsNotice(msgspec.Struct, frozen=True, tag="weights_notice"):
    """Learner to worker: a version is on offer. Only `areal_rloo.weights` encodes and reads `body`."""

    learner_id: Name
    offer_id: Count
    policy_version: Version
    body: bytes


class PartialsCall(msgspec.Struct, frozen=True, tag="partials_call"):
    """Learner to worker: tell the turns of all unfinished train samples; they go on."""

    learner_id: Name
    call_id: Count


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Learner to worker: cancel these duties."""

    learner_id: Name
    duties: Duties


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Learner to worker: cancel all duties, say Goodbye, stop."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Learner to worker: a message was unreadable or not allowed; `detail` says why and how to mend this.

    With `final`, the learner reads no message of this process any more, and the process ends.
    """

    detail: Text
    final: bool = False


PlainWorkerMessage = Hello | Heartbeat | Partials | WeightsReady | WeightsReceived | WeightsFailed | Goodbye
WorkerMessage = PlainWorkerMessage | Results
NumberedMessage = Results | WeightsReceived | WeightsFailed  # kept until acknowledged
LearnerMessage = (
    Welcome | Leases | Ack | HeartbeatReply | PartialsCall | WeightsCall | WeightsNotice | Abort | Drain | Refusal
)
