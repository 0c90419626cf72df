"""Checks of the run folder and the shared memory: access, free space, locks, and the clock of the file system.

A check removes all its folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from areal_rloo.config import Config
from areal_rloo.errors import UserError
from areal_rloo.files import lock_file, memory_folder
from areal_rloo.launcher.doctor.base import Finding, Situation, ok, size, unsure, wrong
from areal_rloo.launcher.doctor.inputs import policy_parameters
from areal_rloo.launcher.doctor.limits import host_memory
from areal_rloo.launcher.placement import gpus_each
from areal_rloo.learner.memory import number_bytes
from areal_rloo.models.sizes import Sizes

_KEY = "run.folder"
_LEAST_INODES = 1000
_LEAST_SHARED_BYTES = 2**30  # for an unknown model; containers get 64 MiB by default, and NCCL alone may need more
_NUM_SEGMENTS = 3  # versions of the weights at a time: offered, being read, being written
_UNSURE_OFFSET_S, _WRONG_OFFSET_S = 2.0, 60.0
# A rename on an object store copies the file, or reaches other hosts late.
_OBJECT_STORES = ("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.geesefs", "fuse.rclone", "fuse.mount-s3", "9p")


def check_run_folder(situation: Situation) -> Iterator[Finding]:
    """Write, rename and lock a file in the run folder."""
    folder = situation.folder
    if folder is None:
        return
    if not _is_mounted(situation, folder):
        yield unsure(_KEY, f"{folder}: not on this host", "make sure that all hosts of the run can write it")
        return
    try:
        with _probed(folder) as probe:
            locks = _locks(probe)
    except OSError as error:
        # /proc and the like say that there is no such file.
        reason = f"{file_system(folder)} takes no new files" if isinstance(error, FileNotFoundError) else error.strerror
        yield wrong(_KEY, f"{folder} cannot be written: {reason}", "choose another")
        return
    kind = file_system(folder)
    if kind in _OBJECT_STORES:
        what = f"{folder} is on {kind}: a checkpoint's rename may be seen late, or half done"
        yield unsure(_KEY, what, "choose a folder on a file system such as NFS or Lustre")
    elif not locks:
        what = f"{folder} is on {kind}, which does not lock files"
        yield unsure(_KEY, what, "mount it with locks (Lustre: -o flock), or choose another")
    else:
        yield ok(_KEY, f"{folder} can be written ({kind})")


def check_free_disk(situation: Situation) -> Iterator[Finding]:
    """Check the free space for logs and checkpoints."""
    config, folder = situation.config, situation.folder
    if folder is None or not _is_mounted(situation, folder):
        return
    place = existing(folder)
    free, least = shutil.disk_usage(place).free, config.launcher.min_free_disk_bytes
    if free < least:
        what = f"{folder} has {free} bytes free, expected launcher.min_free_disk_bytes={least} or more"
        yield wrong(_KEY, what, "free some disk, or choose another")
        return
    inodes = os.statvfs(place)
    if inodes.f_files and inodes.f_favail < _LEAST_INODES:
        yield wrong(_KEY, f"{folder} has room for {inodes.f_favail} files", "remove small files, or choose another")
    parameters = policy_parameters(situation)
    if parameters is None:
        yield ok("disk", f"{size(free)} free")
        return
    one, keep = checkpoint_bytes(config, parameters), _most_checkpoints(config)
    wanted = (keep + 1) * one + least  # a new checkpoint is complete before the oldest is removed
    what = f"{size(free)} free, a checkpoint is some {size(one)}"
    fix = "free some disk, lower checkpoint.keep, checkpoint.keep_best=false, or choose another run.folder"
    if free < one + least:
        yield wrong("disk", f"{what}: not one fits", fix)
    elif free < wanted:
        yield unsure("disk", f"{what}: the {keep} to keep and the next need {size(wanted)}", fix)
    else:
        yield ok("disk", f"{what}, {keep + 1} of them fit")


def _most_checkpoints(config: Config) -> int:
    """Return how many checkpoints the run keeps at the end."""
    kept, every = config.checkpoint, config.checkpoint.keep_every_n_steps
    for_ever = config.learner.num_train_steps // every if every and kept.every_n_steps else 0
    return kept.keep + int(kept.keep_best and bool(config.data.eval_sources)) + for_ever


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """Estimate the size of a checkpoint: float32 weights, two moments per trained weight, and the served model."""
    learner = config.learner
    moments = 0 if learner.lora is not None else 2 * (2 if learner.optimizer.state_dtype == "bfloat16" else 4)
    return parameters * (4 + moments + number_bytes(config))


def check_clock(situation: Situation) -> Iterator[Finding]:
    """Compare the clock of the file system, which may be on another host, with the clock of this host."""
    folder = situation.folder
    if folder is None or not _is_mounted(situation, folder):
        return
    try:
        with _probed(folder) as probe:
            before_s = time.time()  # noqa: TID251 - clocks are what is compared
            probe.write_bytes(b"now")
            offset_s = probe.stat().st_mtime - before_s
    except OSError:
        return  # `check_run_folder` reports the error
    yield clock_finding(offset_s)


def clock_finding(offset_s: float) -> Finding:
    """Judge the difference between the clock of the file system and the clock of this host."""
    if abs(offset_s) <= _UNSURE_OFFSET_S:
        return ok("clock", "the file system of run.folder and this host have the same time")
    side = "ahead of" if offset_s > 0 else "behind"
    what = f"the file system of run.folder is {abs(offset_s):.3g} s {side} this host"
    fix = "set both clocks by NTP: see `timedatectl` or `chronyc tracking`"
    if abs(offset_s) < _WRONG_OFFSET_S:
        return unsure("clock", f"{what}: times of logs and files cannot be compared", fix)
    return wrong("clock", f"{what}: certificates and schedulers refuse such a clock", fix)


def check_shared_memory(situation: Situation) -> Iterator[Finding]:
    """Check the shared memory for the weights, which the learner writes and the workers of the same host read."""
    config = situation.config
    if config.weights_transport(same_host=True) != "shared_memory":
        return
    base = memory_folder()
    usage = shutil.disk_usage(base)
    fix = "enlarge /dev/shm (docker run --shm-size=...)"
    if not config.rollout.takes_turns and not any(gpus_each(config, [situation.host])):  # NCCL may not be possible
        fix += ", or set weights.transport=collective"
    if base != Path("/dev/shm"):
        yield unsure("shared memory", f"/dev/shm cannot be written; weights would go through {base}", fix)
    left = [path for path in base.glob("areal_rloo-*") if path.is_dir()]
    what = f"{base} has {size(usage.free)} of {size(usage.total)} free"
    if left:
        what += f", and {len(left)} folders of other runs"
        fix += "; the next start removes the folders of dead runs"
    parameters = policy_parameters(situation)
    tiny = Sizes.of_tiny(config.model.tiny).num_parameters * number_bytes(config) if config.model.path == "tiny" else 0
    if usage.free < 2 * tiny:
        yield wrong("shared memory", f"{what}; two versions of the weights take {size(2 * tiny)}", fix)
        return
    if parameters is None:
        enough = usage.free >= _LEAST_SHARED_BYTES
        yield ok("shared memory", what) if enough else unsure("shared memory", what, fix)
        return
    one, files = parameters * number_bytes(config), _files_of_servers(situation, parameters)
    if usage.free < 2 * one:
        yield wrong("shared memory", f"{what}; two versions of the weights take {size(2 * one)}", fix)
    elif usage.free < (most := _NUM_SEGMENTS * one + files):
        yield unsure(
            "shared memory", f"{what}; with a slow worker and files of servers the weights take {size(most)}", fix
        )
    else:
        yield ok("shared memory", f"{what}; the weights take {size(most)} at most")


def _files_of_servers(situation: Situation, parameters: int) -> float:
    """Return the bytes of the files through which servers on GPUs get the weights; 0 if the run cannot be planned."""
    try:
        return host_memory(situation, parameters).get("files of servers", 0.0)
    except UserError:  # other checks report the error
        return 0.0


def existing(folder: Path) -> Path:
    """Give the folder, or the nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def file_system(folder: Path) -> str:
    """Give the type of the file system of a folder, which may not exist yet."""
    place = existing(folder.absolute()).resolve()
    mounted = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    mounted.sort(key=lambda part: len(Path(part.mountpoint).parts))  # the last mount of a place hides the others
    return mounted[-1].fstype if mounted else "an unknown file system"


def _is_mounted(situation: Situation, folder: Path) -> bool:
    """Whether this host can check the folder. A login node may not mount the folder's disk."""
    return situation.runs_here or existing(folder.absolute()) != Path("/")


@contextlib.contextmanager
def _probed(folder: Path) -> Iterator[Path]:
    """Make a file in the folder and rename the file; remove the file, and all new folders, at the end."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    first, probe = folder / f".probe-{os.getpid()}", folder / f".probed-{os.getpid()}"
    try:
        first.write_bytes(b"")
        first.rename(probe)
        yield probe
    finally:
        for path in (first, probe):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        for path in missing:
            with contextlib.suppress(OSError):  # another process may use the folder by now
                path.rmdir()


def _locks(probe: Path) -> bool:
    with contextlib.suppress(OSError):
        if lock := lock_file(probe):
            lock.release()
        return True
    return False
