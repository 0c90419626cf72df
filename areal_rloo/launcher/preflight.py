"""What a launcher checks before anything starts, in well under a second: one line and its fix for what is wrong.

The checks are those of `findings/`; here they end a start.
"""

from __future__ import annotations

from pathlib import Path

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.findings import Situation, raise_first
from areal_rloo.launcher.findings.addresses import check_ports
from areal_rloo.launcher.findings.disk import check_free_disk, check_run_folder
from areal_rloo.launcher.findings.inputs import (
    check_data_files,
    check_functions,
    check_models,
    check_sglang,
    check_tool_sandbox,
)


def check(config: Config, *, runs_here: bool = True) -> None:
    """Everything that can be known before the plan.

    Args:
        config: of the run.
        runs_here: whether this host will run it; one that only submits has neither its ports nor its SGLang.

    Raises:
        UserError: the first thing that is wrong.
    """
    situation = Situation(config, runs_here=runs_here)
    inputs = (check_models, check_functions, check_data_files)
    for one in (check_sglang, *inputs, check_ports) if runs_here else inputs:
        raise_first(one(situation))


def check_tools(config: Config, folder: Path) -> None:
    """What the policy may run can be locked in here, and away from the run folder.

    Raises:
        PreflightError: it cannot; says what is missing.
    """
    raise_first(check_tool_sandbox(Situation(config, folder)))


def check_disk(config: Config, folder: Path) -> None:
    """The run folder can be written and has room; it is there afterwards.

    Raises:
        PreflightError: it cannot or has not.
    """
    situation = Situation(config, folder)
    raise_first(check_run_folder(situation))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"run.folder: {folder} cannot be made: {error}; choose another") from error
    raise_first(check_free_disk(situation))
