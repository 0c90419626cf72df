"""`python -m areal_rloo.launcher.slurm`: submit a run as a Slurm job, from a login node.

    checks ─► run folder, job script ─► sbatch ─► with --wait: the job's output, then the job's exit code

job.py runs inside the job. `--dry-run` prints the script and starts nothing. With --wait, Ctrl-C drains the job.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template

from areal_rloo.program import begin_imports, end_on_interrupt, run_main
from areal_rloo.standard_streams import stop_printing

if __name__ == "__main__":
    end_on_interrupt()
    begin_imports()

from areal_rloo.config import Config, argument_name, dump_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.hosts import described_hosts
from areal_rloo.launcher.job import Signals
from areal_rloo.launcher.processes import Tail
from areal_rloo.launcher.run_folder import choose_folder, make_run_folder, point_latest, script_file, submitted_file
from areal_rloo.launcher.slurm.pending import Pending
from areal_rloo.launcher.start import check, check_writable, parse, placed, say_first, show_plan

_MIB = 2**20
_TEMPLATE = "slurm/run.sbatch"
_LOOK_EVERY_S = 0.2
_WAIT_HELP = "follow the job's output and end with its exit code"


def main(arguments: Sequence[str]) -> int:
    """Write the job script and submit the job; give 0, or with --wait the job's exit code.

    Raises:
        UserError: the user must correct something; nothing was submitted.
    """
    options = parse("slurm", arguments, options={"--wait": {"action": "store_true", "help": _WAIT_HELP}})
    config = options.config
    absent = check(config, runs_here=False, dry_run=options.dry_run)
    folder = choose_folder(config, resume=options.resume)
    submitted, job_script = submitted_file(folder), script_file(folder)
    script = sbatch_script(config, submitted, resume=options.resume)
    if _asks_for_no_gpu(config):
        print("launcher.gpus_per_host is not set: the job asks for no GPU, and trains on CPUs", file=sys.stderr)  # noqa: T201
        say_first(config, described_hosts(config.launcher))
    if options.dry_run:
        show_plan(options, described_hosts(config.launcher), folder, absent=absent, script=script)
        return 0
    if config.launcher.cores_per_host:  # else the job has whole nodes of unknown size
        placed(config, described_hosts(config.launcher))
    if shutil.which("sbatch") is None:
        raise PreflightError("sbatch: not found in PATH; run this on a login node of a Slurm cluster")
    check_writable(config, folder)
    is_new = not folder.exists()
    make_run_folder(folder)
    output = folder / _output_name(config, "0")
    submitted.write_text(dump_config(config), encoding="utf-8")
    job_script.write_text(script, encoding="utf-8")
    try:
        if options.of_launcher["wait"]:
            return _follow(job_script, output)
        _, job_id = _submitted(job_script)
    except PreflightError:
        submitted.unlink()  # no job has this file
        if is_new:
            job_script.unlink()
            with contextlib.suppress(OSError):  # somebody has written there since
                folder.rmdir()
        raise
    except KeyboardInterrupt:  # before sbatch answered, so the job may be in the queue or not
        words = "stopped while sbatch submitted the job; `squeue --me` says whether it is queued"
        raise PreflightError(words) from None
    print(f"job {job_id} is submitted; run folder: {folder}")  # noqa: T201
    print(f"output: tail -F {output}; drain it: scancel --batch --signal=TERM {job_id}")  # noqa: T201
    return 0


def _asks_for_no_gpu(config: Config) -> bool:
    """Whether a config may use GPUs but the job asks for none."""
    asked = any(argument_name(written).startswith(("gres", "gpus")) for written in config.launcher.slurm.arguments)
    wanted = "auto" in (config.learner.device, config.rollout.device)
    return wanted and not asked and config.launcher.gpus_per_host is None


def sbatch_script(config: Config, submitted: Path, *, resume: bool) -> str:
    """Make the job script from launcher/slurm/run.sbatch. The job reads the config from the submitted file."""
    folder = submitted.parent
    arguments = [f"--run-folder={folder}", f"--submitted={submitted.name}", *(["--resume"] if resume else [])]
    return Template(_template()).substitute(
        directives="\n".join(f"#SBATCH {directive}" for directive in _directives(config, folder)),
        working_folder=shlex.quote(str(Path.cwd())),
        setup=config.launcher.slurm.setup.strip() or ": # launcher.slurm.setup",
        python=shlex.quote(sys.executable),
        arguments=" ".join(map(shlex.quote, arguments)),
    )


def _template() -> str:
    """Read the template: a wheel has launcher/ inside the package, as assets/; a checkout has launcher/ beside it."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "assets" / _TEMPLATE
    return (inside if inside.is_file() else package.parent / "launcher" / _TEMPLATE).read_text(encoding="utf-8")


def _directives(config: Config, folder: Path) -> list[str]:
    launcher, slurm = config.launcher, config.launcher.slurm
    escaped = str(folder).replace("%", "%%")  # Slurm replaces %
    arguments = {argument_name(written): value for written, value in slurm.arguments.items()}
    memory = None if any(name.startswith("mem-per-") for name in arguments) else "0"  # 0: all memory of a node
    if launcher.memory_per_host:
        memory = f"{-(-launcher.memory_per_host // _MIB)}M"
    options: dict[str, str | float | bool | None] = {  # True: a bare flag; False or None: left out
        "job-name": config.run.name,
        "nodes": launcher.num_hosts,
        "ntasks-per-node": 1,
        "cpus-per-task": launcher.cores_per_host or None,
        "exclusive": not launcher.cores_per_host,
        "mem": memory,
        "gpus-per-node": launcher.gpus_per_host or None,
        "output": f"{escaped}/{_output_name(config, '%a')}",
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.warn_before_s}",
        "requeue" if slurm.requeue else "no-requeue": True,
        "array": f"0-{slurm.num_seeds - 1}" if slurm.num_seeds > 1 else None,
        "time": slurm.time_limit or None,
        "partition": slurm.partition or None,
        "account": slurm.account or None,
        **arguments,
    }
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [f"--{name}" if v is True else f"--{name}={shlex.quote(str(v))}" for name, v in given.items()]


def _output_name(config: Config, index: str) -> str:
    """Name the output file of a job, or of a job in an array, in the run folder."""
    return "job.out" if config.launcher.slurm.num_seeds == 1 else f"job-{index}.out"


def _submitted(script: Path, *options: str, signals: Signals | None = None) -> tuple[subprocess.Popen[str], str]:
    """Submit a job script; give the sbatch, which may still wait for the job, and the job's id.

    Installs `signals` as soon as the job has an id.

    Raises:
        PreflightError: Slurm refuses the job.
        KeyboardInterrupt: Ctrl-C came before sbatch answered.
    """
    submission = subprocess.Popen(
        ["sbatch", *options, "--parsable", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C must not reach sbatch
    )
    assert submission.stdout is not None and submission.stderr is not None, "both are pipes"
    try:
        job_id = submission.stdout.readline().strip().partition(";")[0]
        if signals is None:
            submission.wait()
        else:
            signals.install(with_hup=False)  # Slurm goes on with the job if the terminal closes
    except KeyboardInterrupt:
        submission.kill()
        raise
    if not job_id:
        words = " ".join(submission.stderr.read().split())
        raise PreflightError(f"sbatch refuses the job: {words}; see launcher.slurm, or --dry-run for the script")
    point_latest(script.parent)
    return submission, job_id


def _follow(script: Path, output: Path) -> int:
    """Submit a job script and wait for the end of the job, requeues included; give the job's exit code.

    The first Ctrl-C or SIGTERM drains the job, the second cancels the job.
    """
    tail = Tail(output)  # skips the output of an earlier job
    signals, num_obeyed = Signals(), 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the job has an id
    submission, job_id = _submitted(script, "--wait", signals=signals)
    _say(f"job {job_id} is submitted; waiting for it to start (output: {output})\n")
    pending = Pending(job_id, _say)
    while submission.poll() is None:
        text = tail.read()
        _say(text)
        pending.look(printed=bool(text))
        if signals.num_ends > num_obeyed:
            num_obeyed = signals.num_ends
            _stop(job_id, drain=num_obeyed == 1)
        time.sleep(_LOOK_EVERY_S)
    _say(tail.read())
    return submission.returncode


def _stop(job_id: str, *, drain: bool) -> None:
    """Drain or cancel a job."""
    if not drain:
        _scancel(job_id)
        return
    _say(f"draining job {job_id}; once more cancels it\n")
    # Signal the script of a running job only, which drains the steps in order. A pending job has no script.
    _scancel("--batch", "--signal=TERM", "--state=RUNNING", job_id)
    _scancel("--state=PENDING", job_id)


def _scancel(*arguments: str) -> None:
    ended = subprocess.run(["scancel", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        _say(f"scancel {' '.join(arguments)}: {' '.join(ended.stderr.split())}\n")


def _say(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk; the exit code is still the job's
        stop_printing()


if __name__ == "__main__":
    sys.exit(run_main(main))
