"""Checkpoints for tests: a learner that has trained, a ledger that holds something, and both saved."""

from pathlib import Path

import msgspec
import numpy as np
import torch

from areal_rloo.config import load_config
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import Checkpoints
from areal_rloo.learner.state import LearnerState, Totals, capture
from areal_rloo.learner.team import Team
from areal_rloo.models.files import load_tokenizer
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory

CPU = torch.device("cpu")


def stream() -> PromptStream:
    return PromptStream(
        [Source("all", [Item(str(n)) for n in range(9)])],
        lambda item, _: (int(item.text) + 1,),
        seed=0,
        num_epochs=None,
    )


def checkpoint_state(version: int) -> LearnerState:
    """A ledger with a group in flight and a group half finished."""
    prompts, ledger = stream(), Ledger()
    for _ in range(2):
        prompt = prompts.take()
        assert prompt is not None
        ledger.admit(prompt, group_size=2, admission_version=version, deadline=version + 1)
    completion = Completion(
        np.array([5, 6], np.int32), np.array([-1, -2], np.float32), np.array([0, 1], np.int32), "stop"
    )
    parted = msgspec.structs.replace(completion, spans=(1, 1))
    done = [Trajectory(1, 0, np.array([3], np.int32), made, 0.5) for made in (completion, parted)]
    ledger.groups[1].samples[0].finish(done)
    return LearnerState(
        policy_version=version,
        history=(("learner", 0),),
        totals=Totals(trained_tokens=7),
        kl_coefficient=0.1,
        num_optimizer_steps=2,
        base="a1",
        **capture(ledger, prompts).encoded(),
    )


def trained(folder: Path, *overrides: str) -> Team:
    """Return a learner with a single rank, with trained weights and moments."""
    config = load_config("quickstart.yaml", ["learner.optimizer.learning_rate=1e-2", *overrides])
    rank = build_rank(config, model_path=str(folder), device=CPU)
    for step in range(2):
        for number, parameter in enumerate(p for p in rank.policy.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        rank.optimizer.step()
        rank.schedule.step()
    rank.optimizer.zero_grad(set_to_none=True)
    return Team(rank)


def save(checkpoints: Checkpoints, folder: Path, version: int, *overrides: str) -> Path | None:
    """Return the folder, or None if the disk refused the write."""
    config, tokenizer = load_config("quickstart.yaml", overrides), load_tokenizer(str(folder))
    checkpoints.save(checkpoint_state(version), config, trained(folder, *overrides), tokenizer)
    return checkpoints.folder / f"step-{version:06d}" if checkpoints.wait() else None
