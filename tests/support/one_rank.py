"""Build a learner of a single rank around models made by a test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from areal_rloo.config import Config
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.learner.team import Team
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.loading import Reference, load_policy
from areal_rloo.models.policy import Policy

CPU = torch.device("cpu")


def policy_of(model: PreTrainedModel | Path, *, temperature: float = 1.0, dtype: torch.dtype = torch.float32) -> Policy:
    causal = load_policy(str(model), device=CPU) if isinstance(model, Path) else model
    return Policy(causal, temperature=temperature, dtype=dtype)


def one_rank(
    model: PreTrainedModel | Path,
    config: Config,
    *,
    reference: PreTrainedModel | Path | None = None,
    stop_token_ids: Sequence[int] = (),
) -> TrainStep:
    """Build a train step; `.team.own` is the rank."""
    settings: dict[str, Any] = {
        "temperature": config.rollout.sampling.temperature,
        "dtype": computation_dtype(config.model),
    }
    frozen = None
    if reference is not None:
        frozen = Reference(policy_of(reference, **settings), device=CPU, offload=False)
    rank = LearnerRank(policy_of(model, **settings), config, device=CPU, reference=frozen)
    return TrainStep(Team(rank), config, stop_token_ids=stop_token_ids)
