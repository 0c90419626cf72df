"""What the parts of the engine know together: the connection, the version of its weights, and whether the gate is open.

Changed on the engine's event loop alone; other threads may read single values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_rloo.engines.sglang.server import Connection
from areal_rloo.engines.sglang.updates import ServerUpdates

UNKNOWN = -1


@dataclass(slots=True)
class ServerState:
    """Of the server behind an engine, now.

    Attributes:
        on_weights_lost: called whenever the server turns out to have earlier or unknown weights.
        connection: to it; None while it is away. `updates` belongs to it.
        policy_version: of its weights; UNKNOWN where nobody can say.
        required_version: nothing is sent before it has this version: versions never decrease along a completion.
        epoch: counts the times its output became worthless; what was sent in an earlier one is not used.
        updating: an update is under way: its calls have deadlines of their own, and its health is not judged.
        paused: it stands still for new weights, or is about to.
        suspicious: a connection broke, and it has not shown since that it is healthy.
        hung: why nothing more is expected of this connection.
        connected: there is a connection.
        changed: something happened that may open the gate.
        landed: a request came back.
    """

    on_weights_lost: Callable[[], None]
    connection: Connection | None = None
    updates: ServerUpdates | None = None
    policy_version: int = UNKNOWN
    required_version: int = 0
    epoch: int = 0
    updating: bool = False
    paused: bool = False
    suspicious: bool = False
    hung: str | None = None
    weight_updates: int = 0
    swap_s: float = 0.0
    last_pause_s: float = 0.0
    restarts: int = 0
    health_failures: int = 0
    weights_lost: int = 0
    retractions: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def gate_is_open(self) -> bool:
        """Whether a request may be sent."""
        return (
            self.connection is not None
            and not self.paused
            and not self.suspicious
            and self.policy_version >= self.required_version
        )

    def suspect(self) -> None:
        """A connection broke: the gate is closed until the server was seen to be healthy."""
        self.suspicious = True

    def trust(self) -> None:
        """It is healthy."""
        self.suspicious = False
        self.changed.set()

    def hang(self, updates: ServerUpdates, why: str) -> None:
        """A call of an update missed its deadline, or broke."""
        if self.updates is updates:
            self.hung = why

    def forget_version(self, updates: ServerUpdates) -> None:
        """Nobody knows its weights, and nobody can ask; what it has when it is back is said by `now_has`."""
        if self.updates is not updates:
            return  # a connection of before; the one there is now has said what it has
        self.required_version = max(self.required_version, self.policy_version)
        self.policy_version = UNKNOWN

    def now_has(self, policy_version: int) -> None:
        """The server's weights are these; where it had later ones, they are lost, and so is the output made since."""
        self.required_version = max(self.required_version, self.policy_version)
        self.policy_version = policy_version
        if policy_version < max(self.required_version, 0):
            self.weights_lost += 1
            self.on_weights_lost()
        self.changed.set()
