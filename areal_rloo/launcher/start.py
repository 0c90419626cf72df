"""What every launcher does between the command line and the first process: place, show, write the run folder down."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from areal_rloo.config import Config, dump_config
from areal_rloo.launcher.cli import Options
from areal_rloo.launcher.job import JobRequest
from areal_rloo.launcher.placement import Host, Placement, place, with_counts
from areal_rloo.launcher.plan import Addresses, Plan, on_network, plan_run
from areal_rloo.launcher.run_folder import segment_folder, write_beginning
from areal_rloo.launcher.table import as_json, as_table


def placed(config: Config, hosts: Sequence[Host]) -> tuple[Config, Placement]:
    """The config as this run has it on these hosts, and where its processes sit.

    Raises:
        UserError: it does not fit; says by how much.
    """
    counted = with_counts(config, hosts)
    placement = place(counted, hosts)
    return on_network(counted, placement), placement


def show_plan(options: Options, hosts: Sequence[Host], folder: Path) -> None:
    """Print what would be started: the resolved config and a table, or the plan as JSON."""
    config, placement = placed(options.config, hosts)
    plan = _plan_to_show(config, placement, folder, resume=options.resume)
    if options.as_json:
        print(as_json(plan, placement))  # noqa: T201 - the face of the program
        return
    print(dump_config(config))  # noqa: T201
    print(as_table(plan, placement))  # noqa: T201


def _plan_to_show(config: Config, placement: Placement, folder: Path, *, resume: bool) -> Plan:
    """As it will be, but for what is only known when it starts."""
    return plan_run(
        config,
        placement,
        run_folder=folder,
        model_path="MODEL" if config.model.path == "tiny" else config.model.path,
        addresses=Addresses(config.wire.port, 0, segment_folder("RUN")),
        resume=resume,
        warm_start_s=0.0,
    )


def begin(
    config: Config, placement: Placement, folder: Path, *, wire_port: int, meeting_port: int, resume: bool
) -> JobRequest:
    """Write down what the processes read, and say what is to be run."""
    write_beginning(folder, config, placement.hosts)
    addresses = Addresses(config.wire.port or wire_port, meeting_port, segment_folder(uuid.uuid4().hex[:12]))
    return JobRequest(config, placement, folder, addresses, resume)
