"""Read the run folder, and find the beginning of a replay: which start, which checkpoint, which steps.

A missing part is a DataError, a single line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_rloo.config import check_run
from areal_rloo.config.reading import parse
from areal_rloo.errors import DataError
from areal_rloo.learner.batches import Start, list_batches, list_starts, read_start
from areal_rloo.learner.batches import folder_of as batches_of
from areal_rloo.learner.checkpoint import is_whole
from areal_rloo.learner.checkpoint_folder import folder_of, list_checkpoints
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord

# These options decide a train step; a resumed run may change all others.
_DECIDING = ("model", "algorithm", "learner", "rollout.sampling", "run.seed", "run.entry")


@dataclass(frozen=True, slots=True)
class Recording:
    """The parts of a run folder for a replay; steps as in metrics.jsonl, step N publishes version N."""

    folder: Path
    starts: dict[int, Start]  # by version, the oldest first
    batches: dict[int, list[Path]]  # by step; all batches of a step but the last were refused
    checkpoints: dict[int, Path]  # by version
    records: dict[int, TrainRecord]  # by step


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a run to repeat."""

    start: Start  # decides the first step
    version: int  # of the weights at the beginning
    checkpoint: Path | None  # None: begin with the initial model
    steps: range


def read_recording(folder: Path) -> Recording:
    """Read the names of all batches, and everything small.

    Raises:
        DataError: the folder holds no run, or the run recorded no batches.
    """
    check_run(folder)
    batches = batches_of(folder)
    recording = Recording(
        folder,
        starts={version: read_start(path) for version, path in list_starts(batches).items()},
        batches=list_batches(batches),
        checkpoints=list_checkpoints(folder_of(folder)),
        records={r.num_train_steps: r for r in read_records(folder / "metrics.jsonl") if isinstance(r, TrainRecord)},
    )
    if not recording.batches or not recording.starts:
        raise DataError(f"{batches}: no recorded batches; only a run with wire.record=true can be replayed")
    return recording


def find_part(recording: Recording, version: int, last: int | None) -> Part:
    """Find the part from the newest whole checkpoint at or below `version` to the step `last`; None: to the end.

    Raises:
        DataError: names the missing checkpoint, batch or start, and the recorded steps.
    """
    checkpoint = None
    if version < 0:
        raise DataError(f"--from {version}: expected a version of at least 0")
    if version > 0:
        older = (path for at, path in reversed(recording.checkpoints.items()) if at <= version)
        checkpoint = next((path for path in older if is_whole(path)), None)
        if checkpoint is None:
            raise DataError(
                f"--from {version}: expected an undamaged checkpoint at or below version {version} in "
                f"{recording.folder}, got versions {spans(recording.checkpoints) or 'none'}; --from 0 begins with the "
                "initial model"
            )
        version = next(at for at, path in recording.checkpoints.items() if path == checkpoint)
    recorded = f"the batches of steps {spans(recording.batches)} are recorded"
    last = max(recording.batches) if last is None else last
    if last <= version:
        raise DataError(f"--to {last}: expected a step after version {version}, where the replay begins; {recorded}")
    steps = range(version + 1, last + 1)
    missing = next((step for step in steps if step not in recording.batches), None)
    starts = [start for at, start in recording.starts.items() if at <= version]
    if missing is not None or not starts:
        raise DataError(
            f"step {missing or version + 1}: no batch; {recorded} in {recording.folder}, with checkpoints of versions "
            f"{spans(recording.checkpoints) or 'none'}; choose --from and --to among them"
        )
    return Part(starts[-1], version, checkpoint, steps)


def changed_starts(recording: Recording, part: Part) -> Iterator[tuple[int, str]]:
    """Give the version and the differences of each later start of this part with other deciding options."""
    for version, start in recording.starts.items():
        if part.version < version < part.steps.stop - 1:
            different = _differences(part.start, start)
            if different:
                yield version, ", ".join(different)


def spans(numbers: dict[int, Any]) -> str:
    """Shorten sorted numbers to spans such as `1 to 6, 9`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in found)


def _differences(one: Start, other: Start) -> list[str]:
    ours, theirs = (
        dict(_leaves(parse(start.config, "config of the recording", is_file=True).tree)) for start in (one, other)
    )
    keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    options = [key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in _DECIDING)]
    fields = ("model_path", "device", "num_threads", "software")
    return [*options, *(name for name in fields if getattr(one, name) != getattr(other, name))]


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for key, value in node.items():
        yield from _leaves(value, f"{path}.{key}" if path else str(key))
