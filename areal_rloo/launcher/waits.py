"""Tell the user of long waits for a batch, from the learner's log. Runs on the launcher's main thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_FIRST_S = 60.0
_MOST_BYTES = 64 * 1024  # of a look; in more records, an older wait is not worth a line
_WAIT = re.compile(r"^\S+ +WARNING +\S+ +service: ((\d+) s without progress on the next batch: .*)", re.MULTILINE)


class Waits:
    """The waits for batches in the log of the learner.

    Each line for the user needs twice the wait of the line before: slow generation has long waits, too.
    """

    def __init__(self, log: Path, say: Callable[[str], None]) -> None:
        """Begin at the end of the log, which may have records of an earlier launcher."""
        self._log, self._say = log, say
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
        for text, waited_s in _WAIT.findall(whole.decode(errors="replace")):
            if float(waited_s) >= self._least_s:
                self._least_s = 2 * float(waited_s)
                self._say(f"{text} (logs/learner.log)")
