"""Say why a submitted job does not start: Slurm knows the reason, and a job that can never start waits for ever."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

_EVERY_S = 30.0
_TIMEOUT_S = 20.0  # of a busy controller


class Pending:
    """Asks Slurm for the reason while a job waits, and says each reason once."""

    def __init__(self, job_id: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._job_id, self._say, self._clock = job_id, say, clock
        self._looked_s, self._said = clock(), {"", "None"}

    def look(self, *, printed: bool) -> None:
        """Ask if half a minute has passed without output of the job; a requeued job waits again."""
        if printed:
            self._looked_s, self._said = self._clock(), {"", "None"}
        elif self._clock() - self._looked_s >= _EVERY_S:
            self._looked_s = self._clock()
            if (reason := self._reason()) not in self._said:
                self._said.add(reason)
                self._say(f"job {self._job_id} waits: {reason} (squeue --jobs {self._job_id})\n")

    def _reason(self) -> str:
        """Return the reason of a pending job; empty if the job runs, or Slurm does not answer."""
        command = ["squeue", "--noheader", "--states=PENDING", "--format=%r", "--jobs", self._job_id]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return ended.stdout.partition("\n")[0].strip() if ended.returncode == 0 else ""
