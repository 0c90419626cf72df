"""`python -m areal_rloo.launcher.ray`: a whole run on a Ray cluster, one that is there or one of this machine.

    checks ─► cluster ─► placement groups ─► plan, from where Ray put them ─► processes, each owned by Ray

The same command is what `ray job submit` runs. Ray starts again what dies; what the run itself does is in job.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_rloo.errors import PreflightError
from areal_rloo.launcher.cli import Options, parse, run_main
from areal_rloo.launcher.hosts import described_hosts, this_host
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.preflight import check, look
from areal_rloo.launcher.run_folder import choose_folder
from areal_rloo.launcher.start import begin, hold, show_plan

if TYPE_CHECKING:
    from areal_rloo.launcher.ray_cluster import RayCluster

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set where `ray job submit` has started this process


def main(arguments: Sequence[str]) -> int:
    """Connect, place, run; gives the learner's exit code.

    Raises:
        UserError: something to be mended before anything starts.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray blocks where it starts this as a job
    options = parse("ray", arguments, extend=_extend)
    config = options.config
    check(config, runs_here=False)
    folder = choose_folder(config, resume=options.resume)
    if options.dry_run:
        show_plan(options, _hosts_to_show(options), folder)
        return 0
    if IN_JOB in os.environ and not Path(config.run.folder or "").is_absolute():
        raise PreflightError(
            f"run.folder: expected an absolute path in a Ray job, got {config.run.folder}; the job's working folder is "
            "a copy that goes with it, and all hosts must see the run folder"
        )
    hold(folder, config, resume=options.resume)
    look(config, folder, runs_here=False)
    with _cluster(options) as cluster:
        config, placement = cluster.place(config, name=folder.name)
        wire_port, meeting_port = cluster.reserve_ports(2)
        request = begin(
            config, placement, folder, wire_port=wire_port, meeting_port=meeting_port, resume=options.resume
        )
        return Job(request, cluster.starter(request), Signals().install()).run()


def _cluster(options: Options) -> RayCluster:
    try:
        from areal_rloo.launcher.ray_cluster import RayCluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PreflightError(f"ray: cannot be imported ({error}); pip install 'areal-rloo[ray]'") from error
    return RayCluster(options.of_launcher["address"], options.config.launcher, in_job=IN_JOB in os.environ)


def _hosts_to_show(options: Options) -> list[Host]:
    """Those of the cluster, if one is named; else as the config describes them, or this machine."""
    launcher = options.config.launcher
    if options.of_launcher["address"] is not None:
        with _cluster(options) as cluster:
            return cluster.hosts()
    return described_hosts(launcher) if launcher.num_hosts > 1 else [this_host(launcher)]


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", help="of a Ray cluster, HOST:PORT or auto; without, RAY_ADDRESS, or one is started"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
