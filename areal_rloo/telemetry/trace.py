"""Record the work of a process with times, if `telemetry.trace` is on. `areal_rloo.trace` makes one picture of all.

A process appends to traces/NAME.jsonl: at each start a `Beginning`, then `Span`s. Times are of the host's monotonic
clock, which all processes of a host share. Any thread may record. Outside of `traced`, nothing is recorded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec

from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.record_file import RecordFile

logger = get_logger(__name__)

FOLDER_NAME = "traces"  # in the run folder
SAMPLES = "samples"  # the track of spans with a `sample` among the details: a sample of the fleet
MOST_BYTES = 2**28  # of a file
_BLOCK_BYTES = 2**16
_WRITE_EVERY_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Detail = str | int | float | list[int]


class Beginning(msgspec.Struct, frozen=True, tag="beginning", array_like=True):
    """A start of a process. Both times are of the same moment."""

    process: str  # learner, learner-1, rollout-0
    host: str  # processes with the same value have the same monotonic clock
    wall_s: float  # since 1970
    monotonic_s: float


class Span(msgspec.Struct, frozen=True, tag="span", array_like=True):
    """A piece of work. A moment has 0 seconds."""

    track: str  # the thread, or another name for work that follows one after another or inside other work
    name: str
    began_s: float
    seconds: float
    details: dict[str, Detail]


class _File:
    """The writing end of a process's file. The first error, or too many bytes, end the trace; the run goes on."""

    def __init__(self, path: Path, process: str) -> None:
        path.parent.mkdir(exist_ok=True)
        self._file: RecordFile | None = RecordFile(path)
        self._path, self._left_bytes = path, MOST_BYTES - path.stat().st_size
        self._lock, self._lines, self._num_bytes = threading.Lock(), list[bytes](), 0
        self._over = threading.Event()
        threading.Thread(target=self._write_often, name="trace", daemon=True).start()
        self.add(Beginning(process, _host(), time.time(), time.monotonic()))  # noqa: TID251 - compares clocks of hosts

    def add(self, record: Beginning | Span) -> None:
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            self._lines.append(line)
            self._num_bytes += len(line)
            if self._num_bytes > _BLOCK_BYTES:
                self._write()

    def close(self) -> None:
        self._over.set()
        with self._lock:
            self._write()
            self._end()

    def _write_often(self) -> None:
        """Write at times: the last spans of a process that hangs, or is killed, are on the disk."""
        while not self._over.wait(_WRITE_EVERY_S):
            with self._lock:
                self._write()

    def _write(self) -> None:
        lines, num_bytes = b"".join(self._lines), self._num_bytes
        self._lines, self._num_bytes = [], 0
        if self._file is None or not lines:
            return
        try:
            if num_bytes > self._left_bytes:
                raise OSError(f"it has {MOST_BYTES:,} bytes")
            self._file.append(lines)
            self._left_bytes -= num_bytes
        except OSError as error:
            logger.warning("telemetry.trace: %s ends here: %s", self._path, error)
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_file: _File | None = None
_sample: ContextVar[str] = ContextVar("sample", default="")


@contextmanager
def traced(run_folder: Path, process: str, *, on: bool) -> Iterator[None]:
    """Record the spans of this process while this is entered, if `on`; a disk that refuses ends the trace alone."""
    global _file  # noqa: PLW0603 - like the logs of a process
    try:
        _file = _File(run_folder / FOLDER_NAME / f"{process}.jsonl", process) if on else None
    except OSError as error:
        logger.warning("telemetry.trace: no trace of this process: %s", error)
    try:
        yield
    finally:
        ended, _file = _file, None
        if ended is not None:
            ended.close()


def is_on() -> bool:
    """Return True if this process records."""
    return _file is not None


def record(track: str, name: str, began_s: float | None = None, **details: Detail) -> None:
    """Record a span that ends now; a moment without `began_s`, which is of `time.monotonic`."""
    if (file := _file) is not None:  # another thread may end the trace
        now_s = time.monotonic()
        began_s = now_s if began_s is None else began_s
        file.add(Span(track, name, began_s, now_s - began_s, details))


@contextmanager
def span(track: str, name: str, **details: Detail) -> Iterator[None]:
    """Record the work inside, also if an exception ends it."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        record(track, name, began_s, **details)


@contextmanager
def sample_span(name: str, sample: str = "", **details: Detail) -> Iterator[dict[str, Detail]]:
    """Record the work inside as a stage in the life of a sample. The caller may add details.

    `sample`: a name of its own for each lease. Empty: of the work around this, also in another task.
    """
    sample = sample or _sample.get()
    if _file is None or not sample:  # a trial outside of a run
        yield details
        return
    token, began_s = _sample.set(sample), time.monotonic()
    try:
        yield details
    finally:
        _sample.reset(token)
        record(SAMPLES, name, began_s, sample=sample, **details)


def _host() -> str:
    """Identify the monotonic clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename
