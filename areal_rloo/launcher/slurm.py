"""`python -m areal_rloo.launcher.slurm`: submit a run as a Slurm job, from a login node.

    checks ─► run folder, job script ─► sbatch ─► with --wait: its output as it comes, and its exit code

What the job does on its nodes is in slurm_job.py. `--dry-run` prints the script and starts nothing.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from areal_rloo.config import Config, LauncherConfig, argument_name, dump_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.assets import read_asset
from areal_rloo.launcher.cli import parse, run_main
from areal_rloo.launcher.hosts import described_hosts
from areal_rloo.launcher.preflight import check
from areal_rloo.launcher.run_folder import SCRIPT, choose_folder, point_latest, submitted_file
from areal_rloo.launcher.slurm_follow import SubmissionCutError, follow, refusal
from areal_rloo.launcher.start import placed, show_plan

_MIB = 2**20


def main(arguments: Sequence[str]) -> int:
    """Write the script, submit it, and follow it where asked; gives 0, or the job's exit code with --wait.

    Raises:
        UserError: something to be mended before anything is submitted.
    """
    options = parse("slurm", arguments, extend=_extend)
    config = options.config
    check(config, runs_here=False)
    folder = choose_folder(config, resume=options.resume)
    submitted = submitted_file(folder)
    script = sbatch_script(config, submitted, resume=options.resume)
    if _asks_for_no_gpu(config):
        print("launcher.gpus_per_host is not set: the job asks for no GPU, and trains on CPUs", file=sys.stderr)  # noqa: T201
    if options.dry_run:
        show_plan(options, described_hosts(config.launcher), folder, script=script)
        return 0
    if config.launcher.cores_per_host:  # else the job has whole nodes, and nobody knows yet what these have
        placed(config, described_hosts(config.launcher))
    if shutil.which("sbatch") is None:
        raise PreflightError("sbatch: not found in PATH; run this on a login node of a Slurm cluster")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / _output(config, "0")
    submitted.write_text(dump_config(config), encoding="utf-8")
    (folder / SCRIPT).write_text(script, encoding="utf-8")
    try:
        if options.of_launcher["wait"]:
            return follow(folder, output)
        job_id = _submitted(folder / SCRIPT)
    except PreflightError as error:
        if not isinstance(error, SubmissionCutError):
            submitted.unlink()  # nobody was given it
        raise
    point_latest(folder)
    print(f"job {job_id} is submitted; run folder: {folder}")  # noqa: T201
    print(f"output: tail -F {output}; drain it: scancel --batch --signal=TERM {job_id}")  # noqa: T201
    return 0


def sbatch_script(config: Config, submitted: Path, *, resume: bool) -> str:
    """The job script of a run, from the template in launcher/slurm/.

    Args:
        config: of the run.
        submitted: where the job will find it, in the run folder.
        resume: whether the run goes on from its newest checkpoint.
    """
    folder = submitted.parent
    arguments = [f"--run-folder={folder}", f"--submitted={submitted.name}", *(["--resume"] if resume else [])]
    return Template(read_asset("slurm/run.sbatch")).substitute(
        directives="\n".join(f"#SBATCH {directive}" for directive in _directives(config, folder)),
        working_folder=shlex.quote(str(Path.cwd())),
        setup=config.launcher.slurm.setup.strip() or ": # launcher.slurm.setup",
        python=shlex.quote(sys.executable),
        arguments=" ".join(map(shlex.quote, arguments)),
    )


def _directives(config: Config, folder: Path) -> list[str]:
    launcher, slurm = config.launcher, config.launcher.slurm
    cores = [f"--cpus-per-task={launcher.cores_per_host}"] if launcher.cores_per_host else ["--exclusive"]
    directives = [
        f"--job-name={shlex.quote(config.run.name)}",
        f"--nodes={launcher.num_hosts}",
        "--ntasks-per-node=1",
        *cores,
        *_memory(launcher),
        *([f"--gpus-per-node={launcher.gpus_per_host}"] if launcher.gpus_per_host else []),
        f"--output={shlex.quote(str(folder).replace('%', '%%') + '/' + _output(config, '%a'))}",  # % is Slurm's own
        "--open-mode=append",
        f"--signal=B:USR1@{slurm.warn_before_s}",
        "--requeue" if slurm.requeue else "--no-requeue",
        *([f"--array=0-{slurm.num_seeds - 1}"] if slurm.num_seeds > 1 else []),
        *([f"--time={slurm.time_limit}"] if slurm.time_limit else []),
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
    ]
    for written, value in slurm.arguments.items():
        if value is not None and value is not False:
            name = argument_name(written)
            directives.append(f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}")
    return directives


def _memory(launcher: LauncherConfig) -> list[str]:
    """All of a node where nothing is said, unless the site wants it by core or by GPU."""
    if launcher.memory_per_host:
        return [f"--mem={-(-launcher.memory_per_host // _MIB)}M"]
    by_part = any(argument_name(written).startswith("mem-per-") for written in launcher.slurm.arguments)
    return [] if by_part else ["--mem=0"]


def _output(config: Config, index: str) -> str:
    """The file of the run folder that a job of the array, or the only job, writes its output to."""
    return "job.out" if config.launcher.slurm.num_seeds == 1 else f"job-{index}.out"


def _asks_for_no_gpu(config: Config) -> bool:
    """Whether a config that would take GPUs gets none."""
    asked = any(argument_name(written).startswith(("gres", "gpus")) for written in config.launcher.slurm.arguments)
    wanted = "auto" in (config.learner.device, config.rollout.device)
    return wanted and not asked and config.launcher.gpus_per_host is None


def _submitted(script: Path) -> str:
    """The job's id.

    Raises:
        PreflightError: Slurm refuses it, in its own words; or Ctrl-C came first.
    """
    command = ["sbatch", "--parsable", str(script)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except KeyboardInterrupt:
        raise SubmissionCutError from None
    if ended.returncode != 0:
        raise refusal(ended.stderr)
    return ended.stdout.strip().partition(";")[0]


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="follow the job's output and end with its exit code")


if __name__ == "__main__":
    sys.exit(run_main(main))
