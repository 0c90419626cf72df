"""What `offers.py` asks `broadcast.py` to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """Ask these workers if they can take part in a broadcast."""

    offer_id: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Offer a version to these workers, and send the weights."""

    offer_id: int
    policy_version: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Send the notice of an open offer to a worker again: the notice was lost."""

    offer_id: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker has answered: `taken` if the worker has the version and reads no bucket any more."""

    offer_id: int
    worker_id: str
    taken: bool


@dataclass(frozen=True, slots=True)
class Over:
    """An offer has ended: the weights are sent, and every worker has answered or missed the deadline."""

    offer_id: int


Command = Call | Begin | Repeat | Answered | Over
