"""`python -m areal_rloo.launcher.ray`: a whole run on a Ray cluster, or on a cluster of this machine alone.

    checks ─► cluster ─► placement groups ─► plan, on the nodes that Ray chose ─► processes, each owned by Ray

`ray job submit` runs the same command. Ray restarts dead workers; job.py has the run itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_rloo.program import begin_imports, end_on_interrupt, run_main

if __name__ == "__main__":
    end_on_interrupt()
    begin_imports()

from areal_rloo.config import LauncherConfig
from areal_rloo.errors import PreflightError, install
from areal_rloo.launcher.fleet import ReservedRoom
from areal_rloo.launcher.hosts import described_hosts, host_to_show
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.run_folder import choose_folder
from areal_rloo.launcher.start import (
    Options,
    begin,
    check,
    hold,
    leaves_nothing,
    look,
    parse,
    say_first,
    show_plan,
    transported,
)

if TYPE_CHECKING:
    from areal_rloo.launcher.ray.cluster import RayCluster

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a process that `ray job submit` started
_ADDRESS_HELP = "of a Ray cluster, HOST:PORT or auto; without, RAY_ADDRESS, or one is started"


def main(arguments: Sequence[str]) -> int:
    """Connect, place, run; give the learner's exit code.

    Raises:
        UserError: the user must correct something; nothing was started.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks SIGINT in jobs
    options = parse("ray", arguments, options={"--address": {"help": _ADDRESS_HELP}})
    config = options.config
    if options.dry_run and options.of_launcher["address"] is None:
        say_first(config, *_described(options.config.launcher))
    absent = check(config, runs_here=False, dry_run=options.dry_run)
    folder = choose_folder(config, resume=options.resume)
    if options.dry_run:
        show_plan(options, _hosts_to_show(options), folder, absent=absent)
        return 0
    if IN_JOB in os.environ and not Path(config.run.folder or "").is_absolute():
        raise PreflightError(
            f"run.folder: expected an absolute path in a Ray job, got {config.run.folder}; the job's working folder is "
            "a copy that goes with it, and all hosts must see the run folder"
        )
    with leaves_nothing(folder):
        hold(folder, config, resume=options.resume)
        look(config, folder, runs_here=False)
    with _cluster(options) as cluster:
        config, placement = cluster.place(config, name=folder.name)
        config = transported(config, placement)
        ports = cluster.reserve_ports(2)
        request = begin(config, placement, folder, ports=ports, resume=options.resume, launcher="ray")
        return Job(request, cluster.starter(request), ReservedRoom(placement), Signals().install()).run()


def _cluster(options: Options) -> RayCluster:
    try:
        from areal_rloo.launcher.ray.cluster import RayCluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PreflightError(f"ray: cannot be imported ({error}); {install('ray')}") from error
    return RayCluster(options.of_launcher["address"], options.config.launcher, in_job=IN_JOB in os.environ)


def _hosts_to_show(options: Options) -> list[Host]:
    """Give the hosts of the cluster at --address, else hosts as the config describes them, or this machine."""
    launcher = options.config.launcher
    if options.of_launcher["address"] is not None:
        with _cluster(options) as cluster:
            return cluster.hosts()
    return _described(launcher)[0]


def _described(launcher: LauncherConfig) -> tuple[list[Host], str]:
    """Give hosts for a dry run without a cluster, and say which GPUs are only described."""
    if launcher.num_hosts > 1:
        return described_hosts(launcher), ""
    host, words = host_to_show(launcher)
    return [host], words


if __name__ == "__main__":
    sys.exit(run_main(main))
