"""Write and read the batches of a run, for `areal_rloo.replay`: the folder `batches` of a run with `wire.record`.

    batches/start-000400.json          the recording began at version 400: config and machine
            step-000412-0.msgpack      the batch of step 412, in the order of `take_batch`
            step-000412-1.msgpack      the next batch, if the first was refused because nothing was finite

Step N trains at version N - 1 and publishes version N, as in metrics.jsonl. Trajectories are in the encoding of the
wire: 8 bytes a completion token, 4 a prompt token, some 60 a trajectory. A file is complete or absent. A thread writes
a single batch at a time, beside the train step; a full disk costs batches only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from areal_rloo.decoding import from_json, from_msgpack
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.files import in_pieces, of_pieces, open_regular, read_regular, write_atomically
from areal_rloo.intake.saved_ledger import Deadline
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Group
from areal_rloo.wire.columns import Limits, TrajectoryHeader, decode_columns, encode_columns
from areal_rloo.wire.messages import Count, GroupId

logger = get_logger(__name__)

_START = re.compile(r"start-([0-9]{6,})\.json")
_BATCH = re.compile(r"step-([0-9]{6,})-([0-9]+)\.msgpack")
_DIGEST_BYTES = 16


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a recording. Start, checkpoint and batches together decide every number of a step."""

    policy_version: int  # 0, or the version of the checkpoint
    config: str  # the resolved config as YAML
    model_path: str  # of the initial weights
    device: str
    num_threads: int
    software: dict[str, str]  # see `software`


class _GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """A group without the trajectories."""

    group_id: GroupId
    deadline: Deadline
    source: str
    epoch: Count
    item_index: Count
    num_trajectories: Annotated[int, Meta(ge=1)]


class _Batch(msgspec.Struct, frozen=True):
    """The groups of a batch in order, and their trajectories in order."""

    groups: Annotated[tuple[_GroupHeader, ...], Meta(min_length=1)]
    headers: tuple[TrajectoryHeader, ...]
    columns: tuple[bytes, ...]  # `in_pieces`


def software(device: str) -> dict[str, str]:
    """Name the software and the processor, which decide the last bits of a sum."""
    processor = f"CPU {torch.backends.cpu.get_cpu_capability()}"
    if torch.device(device).type == "cuda":
        processor = torch.cuda.get_device_name(device)
    return {
        "torch": str(torch.__version__),
        **{name: version(name) for name in ("transformers", "numpy")},
        "on": processor,
    }


def folder_of(run_folder: Path) -> Path:
    return run_folder / "batches"


def list_starts(folder: Path) -> dict[int, Path]:
    """Give the starts by version, the oldest first."""
    found = {int(name[1]): path for path in folder.glob("start-*") if (name := _START.fullmatch(path.name))}
    return dict(sorted(found.items()))


def list_batches(folder: Path) -> dict[int, list[Path]]:
    """Give the batches by step, the first step first; all batches of a step but the last were refused."""
    found = sorted(
        (int(name[1]), int(name[2]), path)
        for path in folder.glob("step-*")
        if (name := _BATCH.fullmatch(path.name)) is not None
    )
    steps: dict[int, list[Path]] = {}
    for step, _, path in found:
        steps.setdefault(step, []).append(path)
    return steps


def cut_batches(folder: Path, policy_version: int) -> None:
    """Remove the batches after this version, newest first; a resumed run repeats these steps.

    Call only if no process writes the folder.
    """
    for unfinished in folder.glob(".*.unfinished"):
        unfinished.unlink()
    for step, paths in reversed(list_batches(folder).items()):
        for path in reversed(paths) if step > policy_version else ():
            path.unlink()
    for version_of_start, path in reversed(list_starts(folder).items()):
        if version_of_start >= policy_version:
            path.unlink()


class BatchRecorder:
    """Writes the batches of a learner."""

    def __init__(self, folder: Path, start: Start) -> None:
        self._folder = folder
        self._start: Start | None = start  # None after it was written
        self._place = (start.policy_version, 0)  # version and number of the next batch
        self._num_lost = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._writing: Future[None] | None = None

    def append(self, batch: Sequence[Group], *, policy_version: int) -> None:
        """Begin to write the batch of the step at this version; first wait for the previous batch."""
        if self._writing is not None:
            self._writing.result()
        at, number = self._place
        number = number if at == policy_version else 0
        self._place = (policy_version, number + 1)
        path = self._folder / f"step-{policy_version + 1:06d}-{number}.msgpack"
        self._writing = self._writer.submit(self._write, path, batch)

    def close(self) -> None:
        """Wait for the last batch."""
        self._writer.shutdown()

    def _write(self, path: Path, batch: Sequence[Group]) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            if self._start is not None:
                begun = self._folder / f"start-{self._start.policy_version:06d}.json"
                write_atomically(begun, msgspec.json.format(msgspec.json.encode(self._start)))
                self._start = None
            write_atomically(path, encode_batch(batch))
        except OSError as error:
            self._num_lost += 1
            logger.error("%d batches are missing from %s so far: %s", self._num_lost, self._folder, error)


def encode_batch(batch: Sequence[Group]) -> bytes:
    """Encode a batch: a digest, then the groups and trajectories in order."""
    headers, columns = encode_columns([trajectory for group in batch for trajectory in group.trajectories])
    groups = tuple(
        _GroupHeader(g.group_id, g.deadline, g.source, g.epoch, g.item_index, len(g.trajectories)) for g in batch
    )
    body = msgspec.msgpack.encode(_Batch(groups, headers, in_pieces(columns)))
    return _digest(body) + body


def read_batch(path: Path) -> list[Group]:
    """Read a batch; raises DataError if the file is damaged or of another version."""
    try:
        with open_regular(path) as file:
            content = file.read()
        if _digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            raise DataError(f"{path}: the batch is damaged: another checksum; replay from a later checkpoint")
        batch = from_msgpack(content[_DIGEST_BYTES:], _Batch)
        limits = Limits(max_trajectories=len(batch.headers))
        decoded, _ = decode_columns(batch.headers, of_pieces(batch.columns), limits)
        trajectories = iter(decoded)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise DataError(f"{path}: a batch of another version of areal_rloo: {error}") from error
    num = sum(group.num_trajectories for group in batch.groups)
    if num != len(decoded):
        raise DataError(f"{path}: expected {num} trajectories, as the groups say, got {len(decoded)}")
    of_groups = (group.group_id for group in batch.groups for _ in range(group.num_trajectories))
    for trajectory, group_id in zip(decoded, of_groups, strict=True):
        if trajectory.group_id != group_id:
            raise DataError(f"{path}: expected a trajectory of group {group_id}, got one of {trajectory.group_id}")
    return [
        Group(
            group.group_id,
            group.deadline,
            tuple(islice(trajectories, group.num_trajectories)),
            group.source,
            group.epoch,
            group.item_index,
        )
        for group in batch.groups
    ]


def read_start(path: Path) -> Start:
    """Read a start; raises DataError if the file is unreadable or of another version."""
    try:
        return from_json(read_regular(path), Start)
    except (OSError, DecodeError) as error:
        raise DataError(f"{path}: a start of another version of areal_rloo: {error}") from error


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
