"""What a launcher checks before anything starts, in well under a second: one line and its fix for what is wrong.

The checks are those of `findings/`; here they end a start.
"""

from __future__ import annotations

from pathlib import Path

from areal_rloo.config import Config
from areal_rloo.launcher.findings import Situation, findings, raise_first
from areal_rloo.launcher.findings.inputs import (
    check_data_files,
    check_functions,
    check_models,
    check_sglang,
)
from areal_rloo.telemetry.logs import get_logger, setup_logs

logger = get_logger(__name__)


def check(config: Config, *, runs_here: bool = True) -> None:
    """Everything that can be known before the plan.

    Args:
        config: of the run.
        runs_here: whether this host will run it; one that only submits need not have SGLang.

    Raises:
        UserError: the first thing that is wrong.
    """
    situation = Situation(config, runs_here=runs_here)
    inputs = (check_models, check_functions, check_data_files)
    for one in (check_sglang, *inputs) if runs_here else inputs:
        raise_first(one(situation))


def look(config: Config, folder: Path, *, runs_here: bool = True) -> None:
    """The doctor's quick part, once the plan is made. What may go wrong is in the launcher's log.

    Args:
        config: of the run, with numbers for counts.
        folder: the run folder, which `hold` has made.
        runs_here: as for `check`.

    Raises:
        UserError: the first thing that is wrong.
    """
    unsure = []
    for finding in findings(config, folder=folder, thorough=False, runs_here=runs_here):
        raise_first([finding])
        if finding.state == "unsure":
            unsure.append(f"{finding.name}: {finding.what}; {finding.fix}")
    setup_logs("launcher", level=config.telemetry.log_level, file=folder / "logs" / "launcher.log")
    for words in unsure:
        logger.warning("%s", words)
