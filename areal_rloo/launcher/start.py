"""What every launcher does between the command line and the first process: place, show, write the run folder down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_rloo.config import Config, dump_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.cli import Options
from areal_rloo.launcher.job import JobRequest
from areal_rloo.launcher.placement import Host, Placement, place, with_counts
from areal_rloo.launcher.plan import Addresses, Plan, on_network, plan_run
from areal_rloo.launcher.run_folder import has_begun, second_run, segment_folder, write_beginning
from areal_rloo.launcher.table import as_json, as_table
from areal_rloo.learner.lock import DEAD_HOST_S, Patience, lock_run_folder, wait_for_learner
from areal_rloo.telemetry.progress import stop_printing


def placed(config: Config, hosts: Sequence[Host]) -> tuple[Config, Placement]:
    """The config as this run has it on these hosts, and where its processes sit.

    Raises:
        UserError: it does not fit; says by how much.
    """
    counted = with_counts(config, hosts)
    placement = place(counted, hosts)
    return on_network(counted, placement), placement


def show_plan(options: Options, hosts: Sequence[Host], folder: Path, *, script: str = "") -> None:
    """Print what would be started: the resolved config, a table and, where there is one, the job's script; or the plan
    alone, as JSON."""
    config, placement = placed(options.config, hosts)
    plan = _plan_to_show(config, placement, folder, resume=options.resume)
    whole = [dump_config(config), as_table(plan, placement), *([f"\n{script.rstrip()}"] if script else [])]
    try:
        print(*([as_json(plan, placement)] if options.as_json else whole), sep="\n", flush=True)  # noqa: T201
    except BrokenPipeError:  # whoever closes the pipe, as `| head` does, has read enough
        stop_printing()


def _plan_to_show(config: Config, placement: Placement, folder: Path, *, resume: bool) -> Plan:
    """As it will be, but for what is only known when it starts."""
    return plan_run(
        config,
        placement,
        run_folder=folder,
        model_path="MODEL" if config.model.path == "tiny" else config.model.path,
        addresses=Addresses(config.wire.port, 0, segment_folder(folder)),
        resume=resume,
        warm_start_s=0.0,
    )


def hold(
    folder: Path,
    config: Config,
    *,
    resume: bool,
    again: bool = False,
    stops: Callable[[], bool] = lambda: False,
) -> None:
    """Make the run folder, and have it for ourselves until this process ends.

    Comes before GPUs and ports are looked at, which a run that was here before may still have.

    Args:
        folder: the run folder.
        config: of the run.
        resume: whether the run goes on from its newest checkpoint.
        again: whether the run may seem to go on elsewhere, since its node died a moment ago.
        stops: whether to give up waiting.

    Raises:
        PreflightError: another launcher or learner is at work in this folder, and does not end soon.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"run.folder: {folder} cannot be written: {error}; choose another") from error
    patience = Patience(DEAD_HOST_S if again else config.launcher.drain_timeout_s, _say, stops)
    lock_run_folder(folder, "launcher", patience)
    wait_for_learner(folder, patience)
    if not resume and has_begun(folder):  # by a start that was a moment before this one
        raise second_run(folder)


def begin(
    config: Config,
    placement: Placement,
    folder: Path,
    *,
    wire_port: int,
    meeting_port: int,
    resume: bool,
) -> JobRequest:
    """Write down what the processes read, and say what is to be run.

    Args:
        config, placement: of the run.
        folder: the run folder, held.
        wire_port, meeting_port: of the learner's host, free.
        resume: whether the run goes on from its newest checkpoint.
    """
    write_beginning(folder, config, placement.hosts)
    addresses = Addresses(config.wire.port or wire_port, meeting_port, segment_folder(folder))
    return JobRequest(config, placement, folder, addresses, resume)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the face of the program
