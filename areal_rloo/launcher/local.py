"""`python -m areal_rloo.launcher.local`: a whole run on this machine.

    checks ─► plan ─► warm start, unless the tiny model is cached ─► learner and rollout workers ─► report

Several runs can share the machine: each run has its own ports and GPUs. job.py has the run itself and the signals.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from areal_rloo.program import begin_imports, end_on_interrupt, run_main

if __name__ == "__main__":
    end_on_interrupt()
    begin_imports()

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError
from areal_rloo.files import ScratchFolder, memory_folder
from areal_rloo.launcher.fleet import LocalRoom
from areal_rloo.launcher.hosts import ClaimedGpus, described_hosts, host_to_show, real_host, refused_here, this_host
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.launcher.processes import LocalStarter
from areal_rloo.launcher.run_folder import choose_folder
from areal_rloo.launcher.start import (
    begin,
    check,
    check_here,
    hold,
    leaves_nothing,
    look,
    parse,
    placed,
    say_first,
    show_plan,
)
from areal_rloo.ports import ReservedPorts


def main(arguments: Sequence[str]) -> int:
    """Plan a run, run it, write the report; give the exit code of the learner.

    Raises:
        UserError: the user must correct something; nothing was started.
    """
    options = parse("local", arguments)
    launcher = options.config.launcher
    refusal = refused_here(launcher)
    several = bool(refusal)
    if options.dry_run:
        shown, described = host_to_show(launcher)
        hosts = described_hosts(launcher) if several else [shown]
        say_first(options.config, hosts, f"a start would be refused: {refusal}" if several else described)
    elif not several:
        say_first(options.config, [real_host(launcher)], starts=True)
    absent = check(options.config, runs_here=not several, dry_run=options.dry_run)
    folder = choose_folder(options.config, resume=options.resume)
    if not several:
        absent += check_here(options.config, dry_run=options.dry_run)
    if options.dry_run:
        private_folder = None if several else Path("PRIVATE_FOLDER")
        show_plan(options, hosts, folder, absent=absent, private_folder=private_folder)
        return 0
    if several:
        raise PreflightError(refusal)
    with leaves_nothing(folder):
        hold(folder, options.config, resume=options.resume)
        gpus = ClaimedGpus()
        here = this_host(launcher)
        config, placement = _placed(options.config, here, gpus)
        gpus.keep(gpu_id for seat in placement.seats for gpu_id in seat.gpu_ids)
        look(config, folder)
    with ReservedPorts(2) as reserved, _private_folder() as private_folder:
        request = begin(
            config, placement, folder, ports=reserved.ports, resume=options.resume, private_folder=private_folder
        )
        return Job(request, LocalStarter(launcher.drain_timeout_s), LocalRoom(here, gpus), Signals().install()).run()


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Give a folder of this user that lives as long as this process, with a short path: socket files need that."""
    try:
        scratch = ScratchFolder(memory_folder(), "wire")
    except OSError as error:
        raise PreflightError(f"no folder can be made for the socket of the wire: {error}; free some disk") from error
    with contextlib.closing(scratch):
        yield scratch.path


def _placed(config: Config, here: Host, gpus: ClaimedGpus) -> tuple[Config, Placement]:
    """Place the processes on free GPUs.

    Raises:
        PreflightError: there are too few free GPUs; the message lists the GPUs of other runs.
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
