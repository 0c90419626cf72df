"""A rollout worker as the learner knows it: words, duties, and how much of them the learner believes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from areal_rloo.config import WireConfig
from areal_rloo.wire.messages import Duty, Heartbeat, Lease, digest

LAST_OUTCOMES = 20  # completions; a share of failures among fewer says nothing
_LATE_S = 0.25  # of messages that a process sent before its end


@dataclass(slots=True)
class Standing:
    """What the learner remembers of a worker id. A new process of the worker begins with the standing of the last."""

    failed: deque[bool] = field(default_factory=lambda: deque(maxlen=LAST_OUTCOMES))  # which last completions failed
    set_aside_until_s: float | None = None  # monotonic time; gets no lease until then
    num_set_aside: int = 0  # since the last time that no completion failed
    held_s: float = 0.0  # seconds with duties since the last result, in which the worker may have lost and got duties
    waits: bool = False  # lost leases: gets no other before the next tick, so losing them in a loop costs little


@dataclass(slots=True)
class Worker:
    """A rollout worker, alive since its Hello. Fields without a comment are those of its last message."""

    worker_id: str
    incarnation: str
    peer: str  # address of this incarnation on the wire
    capacity_samples: int
    last_heard_s: float  # monotonic time of the last Hello or heartbeat
    policy_version: int | None
    joined_version: int  # the newest at the Hello; the worker starts no sample with older weights
    progress_s: float  # monotonic time of the last result, lease or generated token
    num_decoding: int = field(default=0, init=False)
    standing: Standing
    duties: set[Duty] = field(default_factory=set)  # leased to the worker and not returned, evaluation included
    num_train: int = 0  # number of train samples in `duties`
    newest_lease: int = 0  # highest id of a lease sent to the worker
    disconnected_s: float | None = None  # monotonic time of the last end of the connection
    owes_partials: int | None = None  # the PartialsCall not answered yet
    stalled: bool = False  # had duties and made no progress: gets no lease while another worker makes progress
    num_lies: int = 0  # answers refused: others get leases first
    eval_s: float = -math.inf  # monotonic time of the last answer to an evaluation sample: the others waited
    compared_s: float = -math.inf  # monotonic time of the last look at all duties for a heartbeat

    @property
    def is_trusted(self) -> bool:
        return self.capacity_samples > 0 and not self.stalled and self.standing.set_aside_until_s is None

    @property
    def gets_leases(self) -> bool:
        return self.is_trusted and not self.standing.waits

    @property
    def free_samples(self) -> int:
        return self.capacity_samples - self.num_train if self.gets_leases else 0

    def is_connected(self, wire: WireConfig) -> bool:
        """Return False from the end of the connection until the process is heard again.

        The last messages of a dead process can be read just after the end of its connection, and are no sign of life.
        """
        late_s = min(_LATE_S, wire.heartbeat_s / 2)
        return self.disconnected_s is None or self.last_heard_s > self.disconnected_s + late_s

    def silent_until_s(self, wire: WireConfig) -> float:
        """Return until when silence is no death: a process without a connection is heard again soon."""
        if self.disconnected_s is None or self.is_connected(wire):
            return self.last_heard_s + wire.heartbeat_timeout_s
        return min(self.last_heard_s + wire.heartbeat_timeout_s, self.disconnected_s + 2 * wire.heartbeat_s)

    def stand_still(self, now_s: float, late_s: float) -> None:
        """Count these seconds before now as no silence."""
        self.last_heard_s = min(now_s, self.last_heard_s + late_s)
        self.progress_s = min(now_s, self.progress_s + late_s)
        if self.disconnected_s is not None:
            self.disconnected_s = min(now_s, self.disconnected_s + late_s)

    def take(self, lease: Lease) -> None:
        """Record a lease for this worker."""
        self.duties.update(lease.duties)
        self.num_train += len(lease.sample_indices) if lease.purpose == "train" else 0
        self.newest_lease = lease.lease_id

    def hold(self, duty: Duty) -> None:
        """Add a duty."""
        self.duties.add(duty)
        self.num_train += duty.purpose == "train"

    def differs(self, heartbeat: Heartbeat) -> bool:
        """Return True if the worker, as far as it has seen the leases, has other duties than the learner thinks."""
        return heartbeat.duties != digest(duty for duty in self.duties if duty.lease_id <= heartbeat.newest_lease)
