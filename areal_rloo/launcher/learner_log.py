"""Tell the user of a run without progress, and of the first step of a resume, with the words of the learner's log.

Runs on the launcher's main thread.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_rloo.telemetry.records import Record, TrainRecord

_MOST_BYTES = 64 * 1024  # of a look; in more records, an older one is not worth a line
_RECORD = re.compile(r"^\S+ +\w+ +\S+ +(?P<module>\w+): (?P<text>.*)", re.MULTILINE)
_RESUMES = ("checkpoint", "resuming")  # modules
_RESUME = re.compile(r"resume: (?:from step (?P<version>\d+)|\d+ of )")
_WAITS = "waits for "
_NOBODY = "no rollout worker is connected"
_HELLO = re.compile(r" says hello with version .* duties, ")  # tells nothing to a person who waits
_EVERY_S = 30.0
_SLOW = 3.0  # times the longest of the last train steps
_STEPS = 10


class LearnerLog:
    """The records for the user in the learner's log."""

    def __init__(
        self, log: Path, say: Callable[[str], None], *, resumed: Callable[[int], None] = lambda version: None
    ) -> None:
        """Begin at the end of the log, which may have records of an earlier launcher.

        `resumed` gets the version of the checkpoint of a resume.
        """
        self._log, self._say, self._resumed = log, say, resumed
        self._position = log.stat().st_size if log.exists() else 0
        self.wait = self.newest = ""  # records: the newest about a wait, and the newest of all

    def look(self) -> None:
        """Read the records since the last look.

        Raises:
            OSError: the log cannot be read.
        """
        if not self._log.exists() or (size := self._log.stat().st_size) == self._position:
            return
        begin = max(self._position if self._position < size else 0, size - _MOST_BYTES)
        with self._log.open("rb") as file:
            file.seek(begin)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position = begin + len(whole + newline)
        for found in _RECORD.finditer(whole.decode(errors="replace")):
            self.newest = self.newest if _HELLO.search(found["text"]) else found["text"]
            self.wait = found["text"] if found["text"].startswith(_WAITS) else self.wait
            if found["module"] in _RESUMES and (resume := _RESUME.match(found["text"])) is not None:
                self._say(found["text"])
                if resume["version"] is not None:
                    self._resumed(int(resume["version"]))


class Silence:
    """Says every 30 s how long no train step has ended, once this takes longer than usual in this run."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        log: LearnerLog,
        path: Path,
        num_train_steps: int,
        worker: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: of the log, for the user. `worker` gives the last words of a worker, for a learner without any."""
        self._say, self._log, self._path, self._worker, self._clock = say, log, path, worker, clock
        self._num_train_steps = num_train_steps
        self._waits_s: deque[float] = deque(maxlen=_STEPS)  # for the last steps
        self.begin()

    def begin(self) -> None:
        """Start the clock: the learner starts now."""
        self._is_done = False
        self._heard_s = self._said_s = self._clock()

    def look(self, records: Sequence[Record]) -> None:
        """Take the records since the last look; after the last step, a run evaluates for as long as it wants."""
        now_s = self._clock()
        waited_s = now_s - self._heard_s
        steps = [record for record in records if isinstance(record, TrainRecord)]
        if steps:
            self._waits_s.extend([waited_s / len(steps)] * min(len(steps), _STEPS))
            self._heard_s, self._said_s, self._log.wait = now_s, now_s, ""
            self._is_done = steps[-1].num_train_steps >= self._num_train_steps
        elif self._is_done:
            return
        elif waited_s >= _SLOW * max(self._waits_s, default=0.0) and now_s - self._said_s >= _EVERY_S:
            self._said_s = now_s
            words = self._log.wait or self._log.newest or "the log is empty"
            worker = self._worker() if _NOBODY in words else ""
            said = f"no train step for {waited_s:.0f} s; the learner says: {words} ({self._path})"
            self._say("; ".join(filter(None, [said, worker])))
