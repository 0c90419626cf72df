"""Tell the user of long waits for a batch, and of the first step of a resume, from the learner's log.

Runs on the launcher's main thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_FIRST_S = 60.0
_MOST_BYTES = 64 * 1024  # of a look; in more records, an older wait is not worth a line
_NOBODY = "no rollout worker is connected"
_WAIT = r"WARNING +\S+ +service: (?P<wait>(?P<waited_s>\d+) s without progress on the next batch: .*)"
_RESUME = r"\w+ +\S+ +(?:checkpoint|resuming): (?P<resume>resume: (?:from step (?P<version>\d+)|\d+ of ).*)"
_TOLD = re.compile(rf"^\S+ +(?:{_WAIT}|{_RESUME})", re.MULTILINE)


class LearnerLog:
    """The records for the user in the learner's log.

    Each line about a wait needs twice the wait of the line before: slow generation has long waits, too.
    """

    def __init__(
        self,
        log: Path,
        say: Callable[[str], None],
        *,
        worker: Callable[[], str] = lambda: "",
        resumed: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Begin at the end of the log, which may have records of an earlier launcher.

        `worker` gives the last words of a rollout worker, for a wait without any connected worker. `resumed` gets the
        version of the checkpoint of a resume.
        """
        self._log, self._say, self._worker, self._resumed = log, say, worker, resumed
        self._least_s = _FIRST_S
        self._position = log.stat().st_size if log.exists() else 0

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
        for found in _TOLD.finditer(whole.decode(errors="replace")):
            if found["resume"] is not None:
                self._say(found["resume"])
                if found["version"] is not None:
                    self._resumed(int(found["version"]))
            elif float(found["waited_s"]) >= self._least_s:
                self._least_s = 2 * float(found["waited_s"])
                words = self._worker() if _NOBODY in found["wait"] else ""
                self._say(f"{found['wait']} ({self._log}){'; ' if words else ''}{words}")
