"""Name, list and set aside the checkpoints of a run. The learner and the launchers call this; torch is not imported.

    checkpoints/step-000050              complete: renamed after all files were on the disk
                set-aside-step-000050    damaged, or of an abandoned history: for people, never loaded or counted
                .unfinished-step-000050  being written, or left by a killed learner
                .replaced-step-000050    the previous step-000050, until its successor has the name
                .removed-step-000050     outdated, being removed

Versions order checkpoints, as numbers. Any other name, such as `step-000004 (copy)`, is no checkpoint. `folder` is
the folder `checkpoints` everywhere.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from areal_rloo.files import move_into_place
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric

logger = get_logger(__name__)

UNWRITTEN = "could not be written"  # in the log of the learner, before the reason; the launcher repeats the reason
_NAME = re.compile(r"step-([0-9]{6,})")
_UNFINISHED, _REPLACED, _REMOVED, _SET_ASIDE = ".unfinished-", ".replaced-", ".removed-", "set-aside-"


class Standing(NamedTuple):
    """The starting point of the next learner. Two standings differ if a checkpoint was written or set aside between."""

    num_set_aside: int
    newest_version: int  # -1 without a checkpoint


class CheckpointStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint on the disk."""

    metrics_prefix: ClassVar[str] = "checkpoint_"

    newest_version: Annotated[int, Metric("Version of the newest checkpoint; 0 without one", "versions")] = 0
    newest_bytes: Annotated[int, Metric("Size of the newest checkpoint", "bytes")] = 0
    newest_timestamp_s: Annotated[float, Metric("Time of the newest checkpoint", "s")] = math.nan
    every_n_steps: Annotated[int, Metric("Train steps from checkpoint to checkpoint; 0 for none")]


def folder_of(run_folder: Path) -> Path:
    """Give the folder of a run's checkpoints."""
    return run_folder / "checkpoints"


def checkpoint_path(folder: Path, version: int) -> Path:
    return folder / f"step-{version:06d}"


def version_of(path: Path) -> int | None:
    """Read the version in a checkpoint's name; None if the name is not that of a checkpoint."""
    found = _NAME.fullmatch(path.name)
    version = None if found is None else int(found[1])
    return None if version is None or path != checkpoint_path(path.parent, version) else version


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Give the complete checkpoints by version, the oldest first."""
    versions = {path: version_of(path) for path in folder.glob("step-*") if path.is_dir()}
    return dict(sorted((version, path) for path, version in versions.items() if version is not None))


def checkpoint_statistics(folder: Path, *, every_n_steps: int) -> CheckpointStatistics:
    """Describe the newest checkpoint, while a learner may write and prune."""
    for version, path in reversed(list_checkpoints(folder).items()):
        try:
            return CheckpointStatistics(
                newest_version=version,
                newest_bytes=_size(path),
                newest_timestamp_s=path.stat().st_mtime,
                every_n_steps=every_n_steps,
            )
        except OSError:  # removed since
            continue
    return CheckpointStatistics(every_n_steps=every_n_steps)


def room_for_one(folder: Path) -> int:
    """Give the size of the newest checkpoint in bytes, for the next one; 0 if there is none, or none can be read."""
    try:
        return _size(next(reversed(list_checkpoints(folder).values())))
    except (StopIteration, OSError):  # a network disk that does not answer, or a checkpoint removed since
        return 0


@functools.lru_cache(maxsize=4)  # the launcher asks ten times a second, perhaps a network disk
def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def standing(folder: Path) -> Standing:
    """Give the starting point of the next learner, to see later whether a run made progress."""
    num_set_aside = sum(1 for _ in folder.glob(f"{_SET_ASIDE}*"))
    return Standing(num_set_aside, max(list_checkpoints(folder), default=-1))


def unfinished_path(path: Path) -> Path:
    """Name the folder in which a checkpoint is written."""
    return path.with_name(_UNFINISHED + path.name)


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Give the checkpoints under way, or under way when the learner died."""
    return [path.with_name(path.name.removeprefix(_UNFINISHED)) for path in folder.glob(f"{_UNFINISHED}*")]


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished checkpoints; call only if no learner writes."""
    for path in unfinished_checkpoints(folder):
        shutil.rmtree(unfinished_path(path), ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish the renames and removals of a killed learner; call only if no learner writes."""
    remove_unfinished(folder)
    for replaced in folder.glob(f"{_REPLACED}*"):
        path = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if not path.exists():  # the kill came between the two renames
            replaced.rename(path)
    _remove_outdated(folder)


def _remove_outdated(folder: Path) -> None:
    """Remove all that is outdated, also what an earlier removal left, for lack of descriptors for example."""
    _mark_replaced(folder)
    for removed in folder.glob(f"{_REMOVED}*"):
        shutil.rmtree(removed, ignore_errors=True)
        if removed.exists():
            logger.warning("%s cannot be removed whole; the next checkpoint tries again", removed)


def _mark_replaced(folder: Path) -> None:
    """Mark replaced checkpoints as removed: no later `recover` gives a name back. A rename needs no descriptor."""
    for replaced in folder.glob(f"{_REPLACED}*"):
        if (folder / replaced.name.removeprefix(_REPLACED)).exists():  # else the only copy
            _mark_removed(replaced)


def _mark_removed(path: Path) -> None:
    try:
        path.rename(_free_name(path, _REMOVED))
    except OSError as error:
        logger.warning("outdated checkpoint %s cannot be removed: %s", path, error)


def _free_name(path: Path, prefix: str) -> Path:
    """Return a path beside `path` that does not exist: the name with the prefix, and perhaps a number."""
    free, number = path.with_name(prefix + path.name), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{prefix}{path.name}-{number}")
    return free


def finish(path: Path) -> None:
    """Give an unfinished checkpoint its name. Until then, a checkpoint of the same version stays complete."""
    replaced = path.with_name(_REPLACED + path.name)
    _mark_replaced(path.parent)
    if path.exists():
        path.rename(replaced)
    try:
        move_into_place(unfinished_path(path), path)
    except OSError:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise
    _remove_outdated(path.parent)


def prune(newest: Path, *, keep: int, spared: Collection[int] = ()) -> None:
    """Remove the checkpoints older than `newest`, except for the last `keep - 1` and the versions in `spared`."""
    newest_version = version_of(newest)
    assert newest_version is not None, f"{newest} is no checkpoint"
    _mark_replaced(newest.parent)  # before their successors lose the name
    older = [(version, path) for version, path in list_checkpoints(newest.parent).items() if version < newest_version]
    for version, path in older[: max(0, len(older) - keep + 1)]:
        if version not in spared:
            _mark_removed(path)  # a kill must not leave a part of a checkpoint under its name
    _remove_outdated(newest.parent)


def set_aside(path: Path) -> None:
    """Rename a checkpoint so that no listing counts it; people can still look at the files."""
    aside = _free_name(path, _SET_ASIDE)
    try:
        path.rename(aside)
    except OSError as error:
        logger.error("%s cannot be set aside: %s; move this folder away", path, error)
    else:
        logger.warning("%s was set aside as %s; nothing reads this folder again", path, aside.name)
