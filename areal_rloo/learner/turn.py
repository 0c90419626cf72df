"""The learner's turn on the devices as its config says: a context manager around each train step."""

from __future__ import annotations

import math
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

    def drain_s() -> float:  # the launcher kills a learner that waits for an engine at the end of a drain
        return config.launcher.drain_timeout_s / 2 if intake.draining else math.inf

    # A server may start twice (`ManagedServer.open`), with an update on each side.
    server_s = 0.0 if (server := config.rollout.server) is None else server.start_timeout_s
    busy_s = PATIENCE_S + 2 * server_s + 2 * config.weights.timeout_s
    turn = LearnerTurn(run_folder, free=team.free_memory, tell=tell, busy_s=busy_s, drain_s=drain_s)
    watch(registry, TurnStatistics, turn.statistics)
    return turn
