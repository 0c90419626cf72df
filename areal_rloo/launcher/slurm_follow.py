"""`--wait`: submit a job, show its output as it comes, end with its exit code. Ctrl-C drains the job."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from areal_rloo.errors import PreflightError
from areal_rloo.launcher.run_folder import SCRIPT, point_latest
from areal_rloo.launcher.tail import Tail
from areal_rloo.telemetry.progress import stop_printing

_LOOK_EVERY_S = 0.2


def follow(folder: Path, output: Path) -> int:
    """Submit the job script of a run folder and stay until the job has ended for good, requeues included.

    The first Ctrl-C or SIGTERM tells the job to drain, the second cancels it.

    Raises:
        PreflightError: Slurm refuses the job, in its own words; or Ctrl-C came first.
    """
    tail = Tail(output)  # without what an earlier job wrote there
    signals = _Signals()
    submission: subprocess.Popen[str] | None = None
    try:
        submission = subprocess.Popen(
            ["sbatch", "--wait", "--parsable", str(folder / SCRIPT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
        )
        assert submission.stdout is not None and submission.stderr is not None, "both are pipes"
        job_id = signals.job_id = submission.stdout.readline().strip().partition(";")[0]
    except KeyboardInterrupt:  # from here on it is for the job
        if submission is not None:
            submission.kill()
        raise SubmissionCutError from None
    if not job_id:
        raise refusal(submission.stderr.read())
    point_latest(folder)
    _say(f"job {job_id} is submitted; waiting for it to start (output: {output})\n")
    while submission.poll() is None:
        _say(tail.read())
        signals.obey()
        time.sleep(_LOOK_EVERY_S)
    _say(tail.read())
    return submission.returncode


def refusal(said: str) -> PreflightError:
    """What sbatch said when it took no job."""
    words = " ".join(said.split())
    return PreflightError(f"sbatch refuses the job: {words}; see launcher.slurm, or --dry-run for the script")


class SubmissionCutError(PreflightError):
    """Ctrl-C came before sbatch had answered, which may have handed the job over."""

    def __init__(self) -> None:
        super().__init__("stopped while sbatch submitted the job; `squeue --me` says whether it is queued")


class _Signals:
    """What was asked for since the start, passed on to the job; before there is one, Ctrl-C is for us."""

    def __init__(self) -> None:
        self.job_id = ""
        self._num_asked = 0
        self._num_passed_on = 0
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def obey(self) -> None:
        if self._num_passed_on == self._num_asked:
            return
        self._num_passed_on = self._num_asked
        if self._num_asked == 1:
            _say(f"draining job {self.job_id}; once more cancels it\n")
            # To its script alone, which drains the steps in order; what has not started has none.
            self._scancel("--batch", "--signal=TERM", "--state=RUNNING")
            self._scancel("--state=PENDING")
        else:
            self._scancel()

    def _scancel(self, *options: str) -> None:
        ended = subprocess.run(["scancel", *options, self.job_id], capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            _say(f"scancel {' '.join(options)} {self.job_id}: {' '.join(ended.stderr.split())}\n")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.job_id:
            raise KeyboardInterrupt
        self._num_asked += 1


def _say(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:  # nobody reads any more, or the disk behind is full; the exit code is still the job's
        stop_printing()
