"""The run folder: the name of the folder, and the files in it for launchers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.decoding import from_json, from_msgpack
from areal_rloo.errors import CheckpointError, ConfigError, DecodeError, PreflightError, shown
from areal_rloo.files import flush_to_disk, move_into_place, open_regular, read_regular, write_atomically
from areal_rloo.launcher.placement import Host
from areal_rloo.learner.checkpoint_folder import folder_of, list_checkpoints
from areal_rloo.learner.lock import lock_path
from areal_rloo.learner.stretches import STATE_NAME, changes_since, has_intact_config
from areal_rloo.tasks import check_same_sources, load_train
from areal_rloo.telemetry.code_state import STARTS_NAME, changed_code, code_state
from areal_rloo.telemetry.own_code import changed_own_code, own_code
from areal_rloo.telemetry.summary import SUMMARY_NAME, set_summary_aside
from areal_rloo.wire.security import make_keys

_LATEST = Path("runs") / "latest"
_SUBMITTED = "submitted-{}.yaml"
_SCRIPT = "job.sbatch"
_OURS = {STARTS_NAME, _SCRIPT, lock_path(Path(), "launcher").name}  # at least one of them is in the folder of a run
_LEFT_ALONE = {"lost+found"}  # in every new file system


def choose_folder(config: Config, *, resume: bool) -> Path:
    """Take `run.folder`, else runs/<name>-<time>; for a resume, else the newest run, if its name is the same.

    Raises:
        CheckpointError: there is no run to resume, or the newest run has another name or no checkpoint.
        PreflightError: the folder holds a run already, or other files, and this start is no resume.
        CheckpointError: a resume with this config is refused (`resume_changes`).
        DataError: the resume would read other prompts.
    """
    if config.run.folder is not None:
        folder = Path(config.run.folder).resolve()
    elif resume:
        folder = _LATEST.resolve()
        _check_name(folder, config.run.name)
    else:
        folder = (Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
        if folder.exists():  # a run of the same second
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
    submitted = any(folder.glob(_SUBMITTED.format("*")))
    if resume and not (has_begun(folder) or submitted):
        raise CheckpointError(f"--resume: {folder} holds no run; expected the folder of one in run.folder")
    if resume and config.run.folder is None and newest_checkpoint(folder) is None:
        raise _nothing_to_resume(folder, config.run.name)
    if not resume:
        if has_results(folder) or submitted:
            raise second_run(folder)
        _check_not_foreign(folder)
    if resume:
        resume_changes(folder, config)
        _check_prompts(folder, config)
    return folder


def _check_not_foreign(folder: Path) -> None:
    """Make sure that a folder with files is the folder of a run which has not trained yet."""
    names = set()
    with contextlib.suppress(OSError):  # no folder, or not readable: refused later, if it cannot be written
        names = {path.name for path in folder.iterdir()}
    foreign = sorted(name for name in names - _LEFT_ALONE if not name.startswith("."))
    if foreign and not names & _OURS:
        raise PreflightError(
            f"run.folder: {folder} holds other files, such as {shown(foreign[0])}; expected an empty folder or the "
            "folder of a run; choose another"
        )


def _check_name(folder: Path, name: str) -> None:
    """Make sure that the newest run is of this experiment."""
    with contextlib.suppress(ConfigError):  # no run, or one of another version of areal_rloo: refused later
        latest = load_config(str(folder / "config.yaml")).run.name
        if latest != name:
            raise CheckpointError(
                f"--resume: the newest run, {folder}, has run.name={latest}, and the config has run.name={name}; set "
                "run.folder to the folder of the run to go on with"
            )


def _nothing_to_resume(newest: Path, name: str) -> CheckpointError:
    """Make the error for a newest run without a checkpoint; the error names an earlier run with a checkpoint."""
    runs = sorted(newest.parent.glob(f"{name}-[0-9]*-[0-9]*"), reverse=True)
    earlier = next((run for run in runs if newest_checkpoint(run) is not None), None)
    fix = "start again without --resume" if earlier is None else f"resume an earlier run with run.folder={earlier}"
    return CheckpointError(
        f"--resume: the newest run, {newest}, has no checkpoint, so nothing was trained there; {fix}"
    )


def make_run_folder(folder: Path) -> None:
    """Make the run folder, closed to other users whatever the umask; a folder that exists keeps the mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def resume_changes(folder: Path, config: Config) -> list[str]:
    """Describe each option that a resume changes, in a line. Writes nothing.

    Raises:
        CheckpointError: the newest checkpoint refuses a changed option, or has more train steps than the config.
    """
    checkpoints = list_checkpoints(folder_of(folder))
    newest, num_steps = max(checkpoints, default=-1), config.learner.num_train_steps
    if newest > num_steps:
        raise CheckpointError(
            f"learner.num_train_steps: expected at least {newest}, the train steps of {checkpoints[newest].name}, got "
            f"{num_steps}; raise it to train on"
        )
    for version, path in reversed(checkpoints.items()):
        if has_intact_config(path):  # else damaged: the learner goes on from an older checkpoint
            changed = changes_since(path, config)
            return [change.line(version) for change in changed if change.key != "run.folder"]  # it is this folder
    return []


class _Sources(msgspec.Struct):
    sources: list[str]


class _State(msgspec.Struct):
    """The part of a checkpoint's state that describes the sources of the prompts."""

    stream: _Sources


def _check_prompts(folder: Path, config: Config) -> None:
    """Compare the train sources with those of the newest checkpoint, before anything is written.

    Raises:
        DataError: the prompts are others; the learner would refuse them, too.
    """
    data = config.data
    is_made = all(source.path is None and ":" not in source.task for source in data.train_sources)
    if is_made and not data.deduplicate:  # by our code, and anew in the learner
        return
    for path in reversed(list_checkpoints(folder_of(folder)).values()):
        try:
            with open_regular(path / STATE_NAME) as file:
                before = from_msgpack(file.read(), _State).stream.sources
        except (OSError, DecodeError):  # damaged: the learner goes on from an older checkpoint
            continue
        check_same_sources(before, [source.description for source in load_train(data, seed=config.run.seed)])
        return


def has_begun(folder: Path) -> bool:
    """Whether a run was started in this folder; a submission alone is no start."""
    return (folder / "config.yaml").exists()


def has_results(folder: Path) -> bool:
    """Whether a run has trained in this folder; the same command may start again a run that was stopped before."""
    records = folder / "metrics.jsonl"
    if records.exists() and not records.is_file():
        return True  # a pipe or a device is left alone
    trained = records.exists() and b'"num_train_steps"' in records.read_bytes()
    return trained or newest_checkpoint(folder) is not None


def second_run(folder: Path) -> PreflightError:
    """Make the error of a fresh start in the folder of another run."""
    return PreflightError(f"run.folder: {folder} holds a run already; add --resume to go on with it, or choose another")


def script_file(folder: Path) -> Path:
    """Name the file for the script of a Slurm job."""
    return folder / _SCRIPT


def submitted_file(folder: Path) -> Path:
    """Name the file for the config of a Slurm job.

    Each submission has a separate file: Slurm may requeue an earlier job, with an earlier config.
    """
    return folder / _SUBMITTED.format(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def newest_submitted(folder: Path) -> Path | None:
    """Return the config of the last submission to Slurm, or None."""
    return max(folder.glob(_SUBMITTED.format("*")), default=None)


def write_beginning(folder: Path, config: Config, hosts: Sequence[Host], launcher: str = "local") -> list[str]:
    """Write the resolved config, a line about this start, and CURVE keys for a wire over TCP; point runs/latest here.

    The summary of an earlier start is set aside, until the learner begins. Returns a line for the user if other code
    began the run, and for each file of the user's code that has changed.
    """
    code, own = code_state(), own_code(config)
    write_atomically(folder / "config.yaml", dump_config(config).encode())  # a process of an earlier start may read it
    set_summary_aside(folder)
    if not (folder / "keys").exists():  # processes of an earlier start may still use the keys
        _make_keys(folder / "keys")
    packages = {found.name: found.version for found in importlib.metadata.distributions()}
    environment = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version,
        "platform": platform.platform(),
        "launcher": launcher,
        "hosts": hosts,
        "code": code,
        "own_code": own,
        "packages": dict(sorted(packages.items())),
        "command": sys.argv,
    }
    starts = folder / STARTS_NAME
    earlier = read_regular(starts) if starts.exists() else b""
    write_atomically(starts, earlier + msgspec.json.encode(environment) + b"\n")
    point_latest(folder)
    return [*filter(None, [changed_code(earlier, code)]), *changed_own_code(earlier, own)]


def point_latest(folder: Path) -> None:
    """Point the link runs/latest to this run, if the run is in a folder of the name runs."""
    if folder.parent.name == _LATEST.parent.name:
        fresh = folder.with_name(f".latest-{os.getpid()}")
        with contextlib.suppress(OSError):  # a file system without links
            fresh.unlink(missing_ok=True)  # of a killed launcher with the same process id
            fresh.symlink_to(folder.name)
            move_into_place(fresh, folder.with_name(_LATEST.name))


def newest_checkpoint(folder: Path) -> str | None:
    """Give the name of the newest checkpoint of a run, or None."""
    return next((path.name for path in reversed(list_checkpoints(folder_of(folder)).values())), None)


def is_finished(folder: Path) -> bool:
    """Whether the training is complete, according to the learner's summary."""
    try:
        summary = from_json(read_regular(folder / SUMMARY_NAME), dict[str, Any])
    except (OSError, DecodeError):
        return False
    return summary.get("exit_reason") in ("completed", "end_of_data")


def _make_keys(folder: Path) -> None:
    """Make the folder of the keys whole: a killed launcher must not leave a part of the keys."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    make_keys(unfinished)
    for path in unfinished.iterdir():
        flush_to_disk(path)
    move_into_place(unfinished, folder)
