"""A run from the first process to the last, the same for every launcher. Runs on the launcher's main thread.

    preparation ─► learner ranks and rollout workers ─► watch until the learner has ended ─► report

A crashed rollout worker is restarted, and so is a preparation that a signal ended; a crashed learner restarts from the
newest checkpoint. The first signal drains (checkpoint, then exit code 0), the second signal kills. The exit code of the
run is the learner's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import signal
import sys
import time
from types import FrameType

from areal_rloo.errors import UserError
from areal_rloo.files import remove_abandoned
from areal_rloo.launcher.fleet import Fleet, Room
from areal_rloo.launcher.learner_log import LearnerLog, Silence
from areal_rloo.launcher.placement import Placement
from areal_rloo.launcher.plan import JobRequest, Plan, plan_run
from areal_rloo.launcher.preparation import Preparation
from areal_rloo.launcher.ranks import LearnerRanks
from areal_rloo.launcher.run_folder import is_finished, newest_checkpoint
from areal_rloo.launcher.supervisor import KILLED, Starter, Supervisor, first_start, named
from areal_rloo.learner.checkpoint_folder import UNWRITTEN, folder_of, room_for_one, standing
from areal_rloo.learner.stretches import breaks_of
from areal_rloo.report import pages_in, result_in
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metrics import RecordTail
from areal_rloo.telemetry.progress import Progress, RunConsole
from areal_rloo.telemetry.summary import (
    SUMMARY_NAME,
    has_earlier_summary,
    restore_earlier_summary,
    summarize_killed,
)
from areal_rloo.telemetry.targets import Targets
from areal_rloo.telemetry.trackers import Trackers

logger = get_logger(__name__)

_FULL_BYTES = 65_536  # free on a disk that takes nothing more
_GRACE_S = 5.0
_LOOK_EVERY_S = 0.1
_TOLD_TO_END = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)


class Signals:
    """Counts signals since `install`. An earlier signal ends the process, so call `install` early."""

    def __init__(self) -> None:
        self.num_ends = 0  # SIGINT and SIGTERM; a closed terminal (SIGHUP) counts as the first
        self.drains = False  # True after SIGUSR1, with which Slurm asks for a checkpoint and a requeue

    def install(self, *, with_usr1: bool = False, with_hup: bool = True) -> Signals:
        """Handle the signals. Under nohup, SIGHUP stays ignored."""
        with_hup = with_hup and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        further = ((signal.SIGUSR1, with_usr1), (signal.SIGHUP, with_hup))
        for number in (signal.SIGTERM, signal.SIGINT, *(number for number, wanted in further if wanted)):
            signal.signal(number, self._on_signal)
        return self

    @property
    def any(self) -> bool:
        return self.num_ends > 0 or self.drains

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.drains = True
        elif number == signal.SIGHUP:  # the kernel and the shell may both send this: a second one must not kill
            self.num_ends = max(self.num_ends, 1)
        else:
            self.num_ends += 1


class Job:
    """A run. After `run`, `unfinished` is True if there is more to train and the run can be resumed."""

    def __init__(self, request: JobRequest, starter: Starter, room: Room, signals: Signals) -> None:
        self._request = request
        self._config, self._folder, self._room = request.config, request.folder, room
        # The learner waits a quarter of drain_timeout_s for the goodbyes of all workers, and ends.
        goodbye_s = self._config.launcher.drain_timeout_s / 2
        console = RunConsole(quiet=not self._config.telemetry.progress)
        self._eval_set = next((source.label for source in self._config.data.eval_sources), "")
        self._health, steps = Health(self._config), self._config.learner.num_train_steps
        self._progress = Progress(
            console,
            num_train_steps=steps,
            eval_set=self._eval_set,
            health=self._health.look,
            unsaved=self._unsaved,
        )
        self._supervisor = Supervisor(starter, request.folder / "logs", goodbye_s=goodbye_s, say=self._progress.warn)
        log = request.folder / "logs" / "learner.log"
        self._learner_log = LearnerLog(log, self._progress.warn, resumed=self._go_back)
        self._silence = Silence(
            self._progress.warn, log=self._learner_log, path=log, num_train_steps=steps, worker=self._words_of_a_worker
        )
        self._trackers = Trackers(self._config, self._folder, self._progress.warn, resume=request.resume)
        self._signals = signals
        self._preparation = Preparation(request, self._supervisor, self._progress, lambda: signals.any)
        self._drain_ends_s: float | None = None
        self._disk_told = 0  # 1: of little room, 2: of no room
        self._trouble = ""
        self.unfinished = False

    def run(self) -> int:
        """Run to the end; give the exit code."""
        progress = self._progress
        progress.say(f"run folder: {self._folder}")
        code = 1
        grace_s = self._config.launcher.drain_timeout_s  # after an exception, the learner may still save a checkpoint
        try:
            with progress:
                goes_on = self._request.resume and self._newest_checkpoint() is not None
                prepared = self._preparation.run(goes_on=goes_on)
                code = prepared if isinstance(prepared, int) else self._supervise(*prepared)
            grace_s = _GRACE_S
        except UserError as error:
            logger.error("%s", error)
            raise
        finally:
            self._supervisor.stop_all(grace_s)
            if code == 0:  # else Prometheus still asks for the processes, and the alarm goes on
                Targets(self._config, self._folder).remove()
            self._trackers.close()
            remove_abandoned()  # the shared memory of a killed learner
            restored = restore_earlier_summary(self._folder)
        if isinstance(prepared, int):
            self.unfinished = code == 0
            if self.unfinished:
                progress.say("stopped during the warm start; nothing was trained yet")
            return code
        if self.unfinished and code == 0:
            newest = self._newest_checkpoint()
            resume = [sys.executable, "-m", "areal_rloo", "resume", str(self._folder)]
            progress.say(
                f"stopped before the last step; go on from {newest}: {shlex.join(resume)}"
                if newest is not None
                else "stopped before the first train step: nothing was trained, and there is nothing to resume"
                if self._config.checkpoint.at_end
                else "stopped without a checkpoint (checkpoint.at_end=false): there is nothing to resume"
            )
        if restored:  # the learner has not begun: there is nothing new to report
            return code
        try:
            for told in (result_in, lambda _: [f"health at the end: {one}" for one in self._health.present], pages_in):
                for words in told(self._folder):
                    progress.say(words)
        except Exception as error:  # noqa: BLE001 - the run has ended well, with or without a report
            progress.say(f"no report: {'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{error}")
        return code

    def _supervise(self, model_path: str, warm_start_s: float) -> int:
        """Start learner and workers, and watch them until the learner has ended and does not restart."""

        def plan(placement: Placement) -> Plan:
            request = dataclasses.replace(self._request, placement=placement)
            return plan_run(request, model_path=model_path, warm_start_s=warm_start_s)

        placement = self._request.placement
        ranks = LearnerRanks(plan(placement), self._supervisor, self._folder, self._progress)
        fleet = Fleet(
            self._config,
            placement,
            folder=self._folder,
            room=self._room,
            plan=plan,
            supervisor=self._supervisor,
            progress=self._progress,
        )
        Targets(self._config, self._folder).begin()
        with first_start():
            ranks.start()
            fleet.start()
        tail = RecordTail(self._folder / "metrics.jsonl")
        self._silence.begin()  # a warm start is no silence of the learner
        if self._request.resume:
            self._look_around(tail, shows=False)
        failure: int | None = None
        while (code := self._ended(ranks, failure, tail)) is None:
            self._look_around(tail)
            self._obey_signals(ranks)
            if self._drain_ends_s is None:
                fleet.resize()
                failure = fleet.tend()
                if failure is not None:
                    self._begin_drain(ranks)
            time.sleep(_LOOK_EVERY_S)
        self._look_around(tail)
        if code == 0:
            self._supervisor.wait(fleet.names, _GRACE_S)  # the learner has told the workers to drain
        told = self._signals.any and failure is None and self._signals.num_ends <= 1
        if told and code in _TOLD_TO_END:
            code = 0  # the signal came before the learner could handle signals
        self._complete_summary(warm_start_s)
        overdue = self._signals.drains and self._signals.num_ends == 0 and code == KILLED
        crashed = told and code not in (0, 2) and ranks.has_restart_left  # instead of a restart, the run ends
        self.unfinished = (code == 0 or overdue or crashed) and failure is None and not is_finished(self._folder)
        if code != 0 and failure != 2:  # else the worker's line is printed, and the launcher itself ended the learner
            killed = self._why_killed() if code in (KILLED, *_TOLD_TO_END) else None
            self._progress.warn(ranks.last_words(code) if killed is None else f"{killed}: exit code {named(code)}")
        code = code if failure is None else failure
        if code != 0:
            self._say_where_to_look(ranks, code)
        return code

    def _complete_summary(self, warm_start_s: float) -> None:
        """Write the summary for a learner that was killed before it could; not for one that never began a resume."""
        path = self._folder / SUMMARY_NAME
        try:
            if not (path.exists() or has_earlier_summary(self._folder)):
                summarize_killed(self._folder, warm_start_s=warm_start_s).write(path)
        except Exception as error:  # noqa: BLE001 - the run has ended, whatever the records or the disk say
            logger.error("summary.json could not be written: %r", error)

    def _look_around(self, tail: RecordTail, *, shows: bool = True) -> None:
        """Show new records and lines of the learner's log, shorten long logs, and warn when the disk becomes full.

        After that, logs may miss the error.
        """
        try:
            self._learner_log.look()  # first: a resume from an earlier version takes back records
            if shows:
                records = tail.read()
                self._progress.show(records)
                if self._drain_ends_s is None:
                    self._silence.look(records)
            else:
                self._recall(tail)
            self._supervisor.shorten_logs()
            self._trackers.look()
            free = shutil.disk_usage(self._folder).free
        except Exception as error:  # noqa: BLE001 - training goes on without this look, whatever the record or the disk
            if self._trouble != str(error):
                logger.error("the launcher cannot look at the run: %r; the run goes on", error)
            self._trouble = str(error)
            return
        self._warn_of_disk(free)

    def _recall(self, tail: RecordTail) -> None:
        version = standing(folder_of(self._folder)).newest_version
        self._health.breaks = breaks = breaks_of(self._folder, resumed=(version, self._config))
        self._progress.recall(tail.read(), version=version, evaluated_after=breaks.evaluations_after(self._eval_set))

    def _warn_of_disk(self, free: int) -> None:
        """Say that the disk has little room, and that it has none; each once until there is room again."""
        told = self._disk_told
        least = max(self._config.launcher.min_free_disk_bytes, room_for_one(folder_of(self._folder)))
        level = 2 if free < _FULL_BYTES else 1 if free < least else 0
        self._disk_told = max(told, level) if level else 0
        if level > told:
            lost = f"a checkpoint or launcher.min_free_disk_bytes needs {least}, so checkpoints and logs may be missing"
            if level == 2:
                newest = self._newest_checkpoint() or "the beginning"
                lost = "no checkpoint and no record can be written, so the line of progress stands still; if the run "
                lost += f"ends now, the steps after {newest} are lost"
            self._progress.warn(f"{self._folder} has {free} bytes free: training goes on, but {lost}; free some disk")

    def _go_back(self, version: int) -> None:
        """A restarted learner takes the steps after this version again."""
        self._progress.go_back(version)
        self._silence.begin()

    def _words_of_a_worker(self) -> str:
        """Give the last record of the first worker, which may wait for a server."""
        words = self._supervisor.last_logged("rollout-0", ": ")
        return f"rollout-0 says: {words} ({self._folder / 'logs' / 'rollout-0.log'})" if words else ""

    def _unsaved(self) -> str:
        """Describe the last checkpoint that could not be written, with the reason from the log of the first rank."""
        reason = self._supervisor.last_logged("learner", f" {UNWRITTEN}: ") or "free some disk"
        log = self._folder / "logs" / "learner.log"
        return f"a checkpoint {UNWRITTEN} to {folder_of(self._folder)}: {reason} ({log} says more)"

    def _ended(self, ranks: LearnerRanks, failure: int | None, tail: RecordTail) -> int | None:
        """Give the learner's exit code; None while the learner runs or restarts."""
        code = ranks.exit_code()
        if code is not None:
            self._look_around(tail)  # the last records of these ranks, before a restart goes back
        refused = code == 2 and not ranks.has_restarted  # at the first start a user's mistake, later a crash
        ends = code == 0 or refused or self._drain_ends_s is not None or self._signals.any or failure is not None
        return code if code is None or ends or not ranks.restart(code) else None

    def _say_where_to_look(self, ranks: LearnerRanks, code: int) -> None:
        resume = f"areal-rloo resume {self._folder}"
        remedy = f"; there is no checkpoint yet: {resume} begins again"
        if code == 2 and not ranks.has_saved:  # the error of the start has its own remedy
            remedy = ""
        elif (newest := self._newest_checkpoint()) is not None:
            remedy = f"; go on from the newest checkpoint ({newest}) with {resume}"
        remedy += "; docs/troubleshooting.md has causes and remedies" * (code != 2)  # else the error has the remedy
        self._progress.warn(f"logs: {self._folder / 'logs'}{remedy}")

    def _why_killed(self) -> str | None:
        """Say why the launcher killed the learner; None if the launcher did not."""
        if self._signals.num_ends > 1:
            return "a second signal (Ctrl-C or SIGTERM) stopped the learner at once"
        if self._is_overdue():
            timeout_s = self._config.launcher.drain_timeout_s
            return f"the learner did not drain within launcher.drain_timeout_s={timeout_s:g}, and was killed"
        return None

    def _is_overdue(self) -> bool:
        return self._drain_ends_s is not None and time.monotonic() > self._drain_ends_s

    def _newest_checkpoint(self) -> str | None:
        with contextlib.suppress(OSError):
            return newest_checkpoint(self._folder)
        return None

    def _obey_signals(self, ranks: LearnerRanks) -> None:
        if self._signals.any and self._drain_ends_s is None:
            if ranks.exit_code() is not None:
                return  # crashed: `_ended` ends the run
            self._progress.say(
                "draining: a checkpoint if the training has begun, then the end; a second signal stops at once"
            )
            self._begin_drain(ranks)
        if self._signals.num_ends > 1 or self._is_overdue():
            ranks.kill()

    def _begin_drain(self, ranks: LearnerRanks) -> None:
        self._drain_ends_s = time.monotonic() + self._config.launcher.drain_timeout_s
        ranks.drain()
