"""The steps of every launcher before the first process, in order.

    parse ─► check ─► (show_plan, for --dry-run) ─► hold ─► placed ─► look ─► begin ─► a JobRequest for job.py

Before `show_plan`, the local launcher calls `check_here`; the others run elsewhere, where `look` makes these checks.

A mistake of the user ends the launcher with a line and exit code 2 before anything is started (`program.run_main`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_rloo.config import (
    EXPECTED,
    Config,
    check_unique,
    dump_config,
    import_entry,
    is_override,
    load_config,
)
from areal_rloo.errors import ConfigError, PreflightError, UserError, is_shortage, shown
from areal_rloo.files import remove_abandoned
from areal_rloo.launcher.doctor import Check, Finding, Situation, findings, guarded, raise_first
from areal_rloo.launcher.doctor.addresses import check_metrics_host, check_servers, check_wire_host
from areal_rloo.launcher.doctor.disk import check_run_folder
from areal_rloo.launcher.doctor.hub import check_downloads
from areal_rloo.launcher.doctor.inputs import (
    check_data_files,
    check_functions,
    check_loading,
    check_models,
    check_own_parts,
    check_server,
    check_unlisted,
)
from areal_rloo.launcher.doctor.limits import check_memory, check_processes, lacking_memory
from areal_rloo.launcher.doctor.software import check_extras
from areal_rloo.launcher.epochs import with_steps
from areal_rloo.launcher.fit import few_words, memory_words, model_sizes, resolved, unused_words
from areal_rloo.launcher.gpu_need import gpu_need
from areal_rloo.launcher.nccl import with_transport
from areal_rloo.launcher.placement import Host, Placement, crowded_words, place
from areal_rloo.launcher.plan import JobRequest, as_json, as_table, on_network, plan_run, wire_address
from areal_rloo.launcher.run_folder import (
    has_results,
    make_run_folder,
    newest_checkpoint,
    resume_changes,
    second_run,
    write_beginning,
)
from areal_rloo.learner.checkpoint_folder import folder_of, standing
from areal_rloo.learner.lock import DEAD_HOST_S, Patience, lock_path, lock_run_folder, wait_for_learner
from areal_rloo.models.sizes import Sizes
from areal_rloo.program import Parser
from areal_rloo.standard_streams import stop_printing
from areal_rloo.telemetry.logs import get_logger, setup_logs
from areal_rloo.telemetry.own_code import own_code, own_code_lines
from areal_rloo.telemetry.stacks import show_on_signal

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed command line; `of_launcher` has the options of a single launcher too."""

    config: Config
    dry_run: bool
    as_json: bool
    resume: bool
    of_launcher: dict[str, Any]


def parse(
    launcher: str, arguments: Sequence[str], *, options: Mapping[str, Mapping[str, Any]] | None = None
) -> Options:
    """Read `[SCRIPT.py] --config NAME.yaml [key.path=value ...] [--key.path=value ...] [--dry-run] [--resume] ...`.

    A script before all other arguments means the same as `--entry`. The entry is imported here. `options` are options
    of this launcher alone, each with the arguments of `add_argument`.

    Raises:
        ConfigError: the config, an override or the entry is wrong.
    """
    parser = Parser(
        prog="areal-rloo run" if launcher == "local" else f"areal-rloo run --launcher {launcher}",
        description="Train with a config, here or with --launcher slurm or ray.\n"
        "Overrides follow as key.path=value or --key.path=value, e.g. algorithm.max_staleness=0.",
        overrides=True,
    )
    if launcher == "local":  # else the usage names it; `run.launcher_of` takes it out of the arguments
        parser.epilog = "--launcher slurm, --launcher ray: on a cluster; with --help, their own options"
    parser.add_argument("--config", required=True, help="a path, or the name of a shipped config")
    parser.add_argument("--entry", help="your script or module, imported by every process; may stand first")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print only the plan, as JSON")
    parser.add_argument("--resume", action="store_true", help="resume the run from the newest checkpoint")
    for name, described in (options or {}).items():
        parser.add_argument(name, **described)
    if arguments and arguments[0].endswith(".py"):
        arguments = ["--entry", *arguments]
    known, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if not is_override(argument):
            flags = "--dry-run, --json, --resume, --entry X.py"
            raise ConfigError(f"argument '{shown(argument)}': expected {EXPECTED}; or {flags}")
    if known.json and not known.dry_run:
        raise ConfigError("argument '--json': expected with --dry-run, whose plan it prints; add --dry-run")
    overrides = rest if known.entry is None else [*rest, f"run.entry={known.entry}"]
    check_unique(overrides)
    config = load_config(known.config, overrides)
    import_entry(config.run.entry)
    try:
        config = with_steps(config)
    except UserError as error:
        if not (known.dry_run and error.absent):  # without the library for the data, a dry run shows `auto`
            raise
    return Options(config, known.dry_run, known.json, known.resume, vars(known))


def say_first(config: Config, hosts: Sequence[Host], described: str = "", *, starts: bool = False) -> None:
    """Say before all checks which GPUs are only described, and which GPUs a config for GPUs needs if there is none.

    `starts`: a run starts on this host, which needs the server too.

    Raises:
        PreflightError: the config needs a GPU and there is none, for a start or if a device is `cuda`.
    """
    words = gpu_need(config, hosts, model_sizes(config, os.environ))
    if words and starts:
        lacks = [found for found in check_server(Situation(config)) if found.error is not None]
        if not lacks and config.rollout.server is not None:
            words += ", or set rollout.device=cpu for a server on CPUs"
        raise PreflightError("; besides, ".join([words, *(f"{found.name}: {found.what}" for found in lacks)]))
    if words and "cuda" in (config.learner.device, config.rollout.device):
        raise PreflightError(f"{words}; with launcher.memory_per_gpu=48GB a dry run shows the plan of such a GPU")
    for line in filter(None, (described, words)):
        _say(line)


def check(config: Config, *, runs_here: bool = True, dry_run: bool = False) -> list[str]:
    """Check the inputs of a run before the plan is made. A host that only submits the run needs no server.

    A dry run shows the plan of a host without the libraries and programs of the run: they are returned, in words.

    Raises:
        UserError: the first wrong finding.
    """
    absent: list[str] = []
    situation = Situation(config, runs_here=runs_here)
    here: tuple[Check, ...] = (check_processes, check_server)
    inputs: tuple[Check, ...] = (check_models, check_functions, check_own_parts, check_data_files)
    loading = check_unlisted if dry_run else check_loading
    for check_input in (*here, *inputs, check_downloads, loading) if runs_here else inputs:
        try:
            _raise_first(check_input, situation, absent, dry_run=dry_run)
        except OSError as error:  # a folder of another user
            if is_shortage(error):
                raise PreflightError(f"the inputs cannot be checked now: {error.strerror}; try again") from error
            raise PreflightError(f"{error.filename}: cannot be looked at: {error.strerror}; choose another") from error
    return absent


def _but_absent(found: Iterable[Finding], absent: list[str], *, dry_run: bool) -> Iterator[Finding]:
    """Leave out findings of things not installed here, if it is a dry run, and keep their words."""
    for finding in found:
        if dry_run and finding.error is not None and finding.error.absent:
            absent.append(str(finding.error))
        else:
            yield finding


def check_here(config: Config, *, dry_run: bool = False) -> list[str]:
    """Check the addresses and the packages of this host for a run here, after `choose_folder` has refused a resume.

    Returns like `check`.

    Raises:
        UserError: the first wrong finding.
    """
    absent: list[str] = []
    for check_part in (check_wire_host, check_metrics_host, check_extras):
        _raise_first(check_part, Situation(config), absent, dry_run=dry_run)
    return absent


def _raise_first(check_part: Check, situation: Situation, absent: list[str], *, dry_run: bool) -> None:
    """Raise the first error of a check. Of a thing to install, also say if the host has too little memory for the run:
    no installation helps there.
    """
    try:
        raise_first(_but_absent(check_part(situation), absent, dry_run=dry_run))
    except UserError as error:
        lacks = [found.error for found in check_memory(situation) if found.error] if error.absent else []
        raise (type(error)(f"{error}; besides, {lacks[0]}", absent=True) if lacks else error) from error


def check_writable(config: Config, folder: Path, *, runs_here: bool = True) -> None:
    """Try to write into the run folder, and leave nothing there.

    Raises:
        PreflightError: the folder cannot be made or written.
    """
    raise_first(check_run_folder(Situation(config, folder, runs_here)))


def placed(config: Config, hosts: Sequence[Host]) -> tuple[Config, Placement]:
    """Replace `auto` in the config and place the processes on the hosts; say what of the plan is poor.

    Raises:
        UserError: the hosts have too few GPUs, GPUs with too little memory, or two versions of NCCL.
    """
    model = model_sizes(config, os.environ)
    counted = resolved(config, hosts, model)
    placement = place(counted, hosts)
    say_unused(config, placement, model)
    for line in filter(None, (*crowded_words(counted, placement), few_words(config, hosts, model))):
        _say(line)
    return on_network(transported(counted, placement), placement), placement


def say_unused(config: Config, placement: Placement, model: Sizes | None) -> None:
    """Say how many GPUs a plan leaves unused; the config is as the user wrote it."""
    if words := unused_words(config, placement, model):
        _say(words)


def transported(config: Config, placement: Placement) -> Config:
    """Choose a transport for two versions of NCCL, and say so; the config has no `auto` of devices.

    Raises:
        PreflightError: no transport is possible or allowed.
    """
    found, words = with_transport(config, placement.used_hosts)
    if words:
        _say(words)
    return found


def show_plan(
    options: Options,
    hosts: Sequence[Host],
    folder: Path,
    *,
    absent: Sequence[str] = (),
    script: str = "",
    private_folder: Path | None = None,
) -> None:
    """Print the resolved config, the plan as a table and the job script, if any; with --json, only the plan.

    `absent`: things not installed here, in words.
    """
    config, placement = placed(options.config, hosts)
    if not options.resume:  # a dry run of a resume leaves even the times of the folder as they are
        check_writable(config, folder, runs_here=False)
    for line in resume_changes(folder, config) if options.resume else ():
        _say(line)
    request = JobRequest(config, placement, folder, wire_address(config, 0, private_folder), 0, options.resume)
    plan = plan_run(request, model_path="MODEL" if config.model.path == "tiny" else config.model.path)
    model = model_sizes(config, os.environ)
    memory = memory_words(config, hosts, model)
    if words := lacking_memory(Situation(config), placement):
        _say(words)
    whole = [dump_config(config), as_table(plan, placement), memory, *([f"\n{script.rstrip()}"] if script else [])]
    try:
        print(*([as_json(plan, placement)] if options.as_json else whole), sep="\n", flush=True)  # noqa: T201
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        stop_printing()
    for words in absent:
        _say(f"not installed here: {words}")


def hold(
    folder: Path, config: Config, *, resume: bool, again: bool = False, stops: Callable[[], bool] = lambda: False
) -> None:
    """Make the run folder and lock it until this process ends.

    Launchers call this before they look at GPUs and ports: an earlier run in this folder may still hold some. The wait
    is longer if Slurm restarted this job (`again`): a crashed node may still hold the lock.

    Raises:
        PreflightError: another launcher or learner uses the folder, and did not end in time.
    """
    show_on_signal()
    check_writable(config, folder)
    make_run_folder(folder)
    patience = Patience(DEAD_HOST_S if again else config.launcher.drain_timeout_s, _say, stops)
    lock_run_folder(folder, "launcher", patience)
    remove_abandoned()
    wait_for_learner(folder, patience)
    if not resume and has_results(folder):  # of another launcher, meanwhile
        raise second_run(folder)


@contextlib.contextmanager
def leaves_nothing(folder: Path) -> Iterator[None]:
    """Remove the folder and new parents if a mistake or Ctrl-C ends the block before a run has begun in the folder."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except (UserError, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # the folder is not empty: a run has begun
            lock = lock_path(folder, "launcher")
            if folder in missing and list(folder.iterdir()) == [lock]:
                lock.unlink()
            for path in missing:
                path.rmdir()
        raise


def look(config: Config, folder: Path, *, runs_here: bool = True) -> None:
    """Make the quick checks of the doctor, open the log in the locked folder, and log each `unsure` finding.

    Raises:
        UserError: the first wrong finding.
    """
    unsure = []
    for finding in findings(config, folder=folder, thorough=False, runs_here=runs_here):
        raise_first([finding])
        if finding.state == "unsure":
            unsure.append(f"{finding.name}: {finding.what}; {finding.fix}")
    for finding in guarded(check_servers, Situation(config)) if runs_here else ():
        if finding.state != "ok":  # a server may start later
            _say(f"{finding.name}: {finding.what}; {finding.fix}")
    setup_logs("launcher", level=config.telemetry.log_level, file=folder / "logs" / "launcher.log")
    for words in unsure:
        logger.warning("%s", words)


def begin(
    config: Config,
    placement: Placement,
    folder: Path,
    *,
    ports: tuple[int, ...],
    resume: bool,
    private_folder: Path | None = None,
    launcher: str = "local",
) -> JobRequest:
    """Write the input files of the processes into the locked folder, and describe the run.

    Args:
        ports: two free ports of the learner's host, for the wire and for the meeting of ranks.
        private_folder: of this user, for the socket file of the wire, if all processes are on this host.

    Raises:
        CheckpointError: the newest checkpoint refuses a changed option (`resume_changes`); nothing was written.
    """
    wire_port, meeting_port = ports
    wire = wire_address(config, wire_port, private_folder)
    for line in resume_changes(folder, config) if resume else ():
        _say(line)
        logger.info("%s", line)
    if resume and newest_checkpoint(folder) is None:
        _say(f"{folder} has no checkpoint, so --resume begins from the beginning")
    if resume and standing(folder_of(folder)).newest_version == config.learner.num_train_steps:
        _say(
            f"nothing is left to train: {newest_checkpoint(folder)} has all learner.num_train_steps="
            f"{config.learner.num_train_steps}; raise this number to go on"
        )
    try:
        changed = write_beginning(folder, config, placement.hosts, launcher)
    except OSError as error:  # a full disk
        raise PreflightError(f"run.folder: {folder} cannot be written: {error.strerror}; free some disk") from error
    for line in changed:
        _say(line)
        logger.warning("%s", line)
    for line in own_code_lines(own_code(config)):
        _say(line)
        logger.info("%s", line)
    return JobRequest(config, placement, folder, wire, meeting_port, resume)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the face of the program
