"""The learner's turn on the devices as its config says: a context manager around each train step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from prometheus_client import CollectorRegistry

from areal_rloo.config import Config
from areal_rloo.intake.service import IntakeService
from areal_rloo.learner.team import Team
from areal_rloo.telemetry.metrics import watch
from areal_rloo.turns import PATIENCE_S, LearnerTurn, TurnStatistics


def turn_of_learner(
    config: Config, run_folder: Path, team: Team, intake: IntakeService, registry: CollectorRegistry
) -> AbstractContextManager[None]:
    """Return the turns of a run whose engines wait during a step; otherwise a context without effect.

    Raises:
        PreflightError: the files of the turns cannot be made.
    """
    if not config.rollout.takes_turns:
        return nullcontext()

    def tell(computes: bool) -> None:
        intake.fleet.engines_wait = computes  # a flag, which the loop reads

    # A drain must not end during the wait for an engine that hangs.
    patience_s = min(PATIENCE_S, config.launcher.drain_timeout_s / 2)
    server = config.rollout.server
    turn = LearnerTurn(
        run_folder,
        free=team.free_memory,
        tell=tell,
        patience_s=patience_s,
        start_s=0.0 if server is None else server.start_timeout_s,
        hurries=lambda: intake.draining,
    )
    watch(registry, TurnStatistics, turn.statistics)
    return turn
