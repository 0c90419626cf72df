"""`python -m areal_rloo.launcher.slurm_job`: a run, inside the Slurm job that was submitted for it, on its first node.

    nodes of the job ─► plan ─► each process a step ─► the learner's exit code, or back into the queue with a checkpoint

USR1, which Slurm sends before the time limit, drains and requeues; so does a preemption, which tells the steps alone.
TERM, from scancel, drains and ends. A job that Slurm itself started again goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import import_entry, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.cli import run_main
from areal_rloo.launcher.job import Job, Signals
from areal_rloo.launcher.preflight import look
from areal_rloo.launcher.run_folder import has_begun, newest_checkpoint, seed_folder
from areal_rloo.launcher.slurm_nodes import allocated_hosts
from areal_rloo.launcher.slurm_steps import StepStarter
from areal_rloo.launcher.start import begin, hold, placed
from areal_rloo.ports import ReservedPorts
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the job; gives the learner's exit code.

    Raises:
        UserError: something to be mended before anything starts.
    """
    signals = Signals().install(with_usr1=True)
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.launcher.slurm_job")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--submitted", required=True, help="the file of the run folder that has the config")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    submitted = load_config(str(options.run_folder / options.submitted))
    seed = submitted.run.seed + int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    folder = seed_folder(options.run_folder, submitted, seed)
    run = msgspec.structs.replace(submitted.run, seed=seed, folder=str(folder))
    config = msgspec.structs.replace(submitted, run=run)
    import_entry(config.run.entry)
    again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    resume = options.resume or (again and has_begun(folder))
    hold(folder, config, resume=resume, again=again, stops=lambda: signals.any)
    config, placement = placed(config, allocated_hosts(config.launcher))
    look(config, folder, runs_here=config.launcher.container.runtime == "none")
    with ReservedPorts(2) as reserved:
        wire_port, meeting_port = reserved.ports
        request = begin(
            config,
            placement,
            folder,
            wire_port=wire_port,
            meeting_port=meeting_port,
            resume=resume,
        )
        job = Job(request, StepStarter(config.launcher, folder), signals)
        try:
            code = job.run()
        except PreflightError as error:
            if not job.unfinished:
                raise
            print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the output of the job
            code = 2
    if not job.unfinished or signals.num_ends or not config.launcher.slurm.requeue:
        return code
    return _requeued(folder)


def _requeued(folder: Path) -> int:
    """Put this job back into the queue; gives the exit code.

    Raises:
        PreflightError: that would lead nowhere, or Slurm refuses.
    """
    checkpoint, note = newest_checkpoint(folder) or "", folder / ".requeued-at"
    if note.exists() and note.read_text() == checkpoint:
        raise PreflightError(
            "launcher.slurm.time_limit: the job was stopped twice without a new checkpoint in between; raise it, or "
            "lower launcher.slurm.warn_before_s; if the job was preempted, submit it again with --resume"
        )
    note.write_text(checkpoint)
    array = os.environ.get("SLURM_ARRAY_JOB_ID")  # the id of its last job is that of all of them
    job_id = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    logger.info("there is more to train: back into the queue")
    ended = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise PreflightError(
            f"scontrol requeue {job_id}: {' '.join(ended.stderr.split())}; submit it again with --resume"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
