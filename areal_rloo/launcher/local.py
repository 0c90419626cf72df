"""`python -m areal_rloo.launcher.local`: a whole run on this machine.

    checks ─► plan ─► warm start, if the tiny model is not there yet ─► learner and rollout workers ─► report

Several runs go side by side: each has ports of its own, and GPUs that no other has. What the run itself does, and what
signals mean to it, is in job.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.cli import parse, run_main
from areal_rloo.launcher.hosts import ClaimedGpus, described_hosts, this_host
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.launcher.preflight import check, look
from areal_rloo.launcher.processes import LocalStarter
from areal_rloo.launcher.run_folder import choose_folder
from areal_rloo.launcher.start import begin, hold, placed, show_plan
from areal_rloo.ports import ReservedPorts


def main(arguments: Sequence[str]) -> int:
    """Plan, run, report.

    Raises:
        UserError: something to be mended before anything starts.
    """
    options = parse("local", arguments)
    launcher = options.config.launcher
    several = launcher.num_hosts > 1
    check(options.config, runs_here=not several)
    folder = choose_folder(options.config, resume=options.resume)
    if options.dry_run:
        show_plan(options, described_hosts(launcher) if several else [this_host(launcher)], folder)
        return 0
    if several:
        raise PreflightError(
            f"launcher.num_hosts: expected 1 with the local launcher, got {launcher.num_hosts}; "
            "start it with areal_rloo.launcher.ray or areal_rloo.launcher.slurm"
        )
    hold(folder, options.config, resume=options.resume)
    gpus = ClaimedGpus()
    config, placement = _placed(options.config, this_host(launcher), gpus)
    gpus.keep(gpu_id for seat in (*placement.learner, *placement.workers) for gpu_id in seat.gpu_ids)
    look(config, folder)
    with ReservedPorts(2) as reserved:
        request = begin(
            config,
            placement,
            folder,
            wire_port=reserved.ports[0],
            meeting_port=reserved.ports[1],
            resume=options.resume,
        )
        return Job(request, LocalStarter(), Signals().install()).run()


def _placed(config: Config, here: Host, gpus: ClaimedGpus) -> tuple[Config, Placement]:
    """Seats on the GPUs that no other run has.

    Raises:
        PreflightError: there are too few; says which ones others have.
    """
    free = gpus.claim(here)
    taken = [gpu_id for gpu_id in here.gpu_ids if gpu_id not in free.gpu_ids]
    words = f"other runs on this machine have GPUs {', '.join(taken)}"
    if taken and not free.gpu_ids and "auto" in (config.learner.device, config.rollout.device):
        raise PreflightError(f"devices: no GPU is free, {words}; wait for one, or set the devices to cpu")
    try:
        return placed(config, [free])
    except PreflightError as error:
        raise (PreflightError(f"{error}; {words}") if taken else error) from error


if __name__ == "__main__":
    sys.exit(run_main(main))
