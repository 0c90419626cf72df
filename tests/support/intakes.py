"""Intakes with the parts a run gives them, for tests to drive without sockets."""

from collections.abc import Sequence
from pathlib import Path

import torch

from areal_rloo.config import load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.tasks import Item, Source
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.manifest import build_manifest
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.messages import MOST_COUNT, Duty, Failed, Heartbeat, Leases, Results, Work, digest

VOCAB_SIZE = 100
LEARNER = "learner"  # the id of the learner of `make_intake`
ONE_GROUP = (
    "algorithm.group_size=2",
    "learner.groups_per_step=1",
    "learner.num_minibatches=1",
    "algorithm.max_staleness=0",
)
MANIFEST = build_manifest([("w", torch.zeros(8))], bucket_bytes=1000)


def make_offers() -> Offers:
    return Offers(together=False, timeout_s=300.0, call_timeout_s=2.0)


def make_broadcaster(folder: Path) -> Broadcaster:
    transport = SharedMemorySender(MANIFEST, folder / "segments")
    return Broadcaster(manifest=MANIFEST, transport=transport, offers=make_offers())


def make_intake(
    offers: Offers, *overrides: str, ledger: Ledger | None = None, stream: PromptStream | None = None
) -> Intake:
    """An intake over eight prompts, without evaluation."""
    source = Source("all", [Item("1+1=?", "2")] * 8)
    config = load_config("quickstart.yaml", overrides)
    return Intake(
        config,
        ledger=ledger or Ledger(),
        stream=stream or PromptStream([source], lambda *_: (1, 2), seed=0, num_epochs=None),
        evaluation=Evaluation([], lambda _: None),
        offers=offers,
        policy_version=0,
        history=((LEARNER, 0),),
        lies=Lies(config, vocab_size=VOCAB_SIZE),
    )


def heartbeat(duties: Sequence[Duty] = (), *, newest: int = MOST_COUNT, tokens: int = 0, met: bool = True) -> Heartbeat:
    """Make the heartbeat of a worker with these duties; `met`: the worker knows the learner."""
    return Heartbeat(LEARNER if met else None, 2, newest, digest(duties), 0, 0, False, Work(0.0, tokens))


def duties_of(messages: Sequence[Outgoing], peer: str | None = None) -> list[Duty]:
    """Return the duties that these messages lease to a peer, or to all peers."""
    leases = [message for to, message in messages if isinstance(message, Leases) and peer in (None, to)]
    return [duty for message in leases for lease in message.leases for duty in lease.duties]


def fail(
    intake: Intake, worker: str, duties: Sequence[Duty], reason: str = "reward_error", *, now_s: float = 0.0
) -> list[Outgoing]:
    """Let a worker give these duties up; return the messages of the intake."""
    failed = tuple(Failed(*duty, reason, "no", "", 3) for duty in duties)
    return intake.handle(worker, Results(LEARNER, 7, (), failed), now_s)
