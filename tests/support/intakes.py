"""Intakes with the parts a run gives them, for tests to drive without sockets."""

from pathlib import Path

import torch

from areal_rloo.config import load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.tasks import Item, Source
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.manifest import build_manifest
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender

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
        stream=stream or PromptStream([source], lambda _: (1, 2), seed=0, num_epochs=None),
        evaluation=Evaluation([], lambda _: None),
        offers=offers,
        policy_version=0,
        history=((LEARNER, 0),),
        lies=Lies(config, vocab_size=VOCAB_SIZE),
    )
