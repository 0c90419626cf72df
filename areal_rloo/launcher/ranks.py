"""The ranks of the learner as a unit: they start, end and restart together. Runs on the launcher's main thread.

In: a plan. Out: the exit code of the learner, and words for the user about this end.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec

from areal_rloo.errors import EXIT_RANK_LOST, EXIT_UNSAVED
from areal_rloo.launcher.plan import Plan
from areal_rloo.launcher.run_folder import newest_checkpoint
from areal_rloo.launcher.supervisor import KILLED, Supervisor, backoff_s, named
from areal_rloo.learner.checkpoint_folder import (
    folder_of,
    remove_unfinished,
    standing,
    unfinished_checkpoints,
)
from areal_rloo.telemetry.progress import Progress

_GRACE_S = 5.0
_KILLED_WHILE_SAVING = (
    " The learner was killed while it wrote {checkpoint}: probably the kernel needed memory (see `dmesg`), because a "
    "checkpoint is copied to CPU memory first. Give the learner's host more memory, or set "
    "learner.optimizer.state_dtype=bfloat16 or learner.lora for a smaller copy."
)


class LearnerRanks:
    """The ranks of the learner. Rank 0 leads; the other ranks follow."""

    def __init__(self, plan: Plan, supervisor: Supervisor, folder: Path, progress: Progress) -> None:
        self._specs = plan.learner
        self._max_restarts = plan.max_learner_restarts
        self._supervisor = supervisor
        self._folder = folder
        self._progress = progress
        self._num_restarts = 0
        self._began_from = standing(folder_of(folder))
        self._was_killed_saving = False  # since the last checkpoint
        self._is_killed_here = False
        self._restarting = False
        self._num_failed_starts = 0
        self._start_at_s = 0.0  # after a failed start
        self._said: set[str] = set()  # followers whose end was printed since the last start
        self._leader, *self._followers = (spec.name for spec in plan.learner)

    def start(self) -> None:
        for spec in self._specs:
            self._supervisor.start(spec)

    @property
    def has_restarted(self) -> bool:
        return self._num_restarts > 0

    @property
    def has_saved(self) -> bool:
        """Whether the learner has written a checkpoint since its last start."""
        try:
            return standing(folder_of(self._folder)).newest_version > self._began_from.newest_version
        except OSError:
            return False

    @property
    def has_restart_left(self) -> bool:
        """Whether a dead learner is being restarted, or can be."""
        try:
            num_restarts = self._num_restarts if standing(folder_of(self._folder)) == self._began_from else 0
        except OSError:  # `restart` would repeat the look
            return True
        return self._restarting or num_restarts < self._max_restarts

    def exit_code(self) -> int | None:
        """Give the exit code of the learner, with the cause if a follower has it; None while rank 0 runs.

        Without a follower, the learner can neither train nor save, and may wait for a batch without noticing: kill
        rank 0 then.
        """
        if any(self._supervisor.exit_code(name) for name in self._followers):
            self._supervisor.wait([self._leader], _GRACE_S)  # rank 0 may end with a better message
            self._supervisor.kill(self._leader)
        code = self._supervisor.exit_code(self._leader)
        if code is not None:
            self._supervisor.wait(self._followers, _GRACE_S)
        code = 1 if code == EXIT_UNSAVED else code
        if code in (None, 0, 2):
            return code
        for name in self._followers:
            own = self._supervisor.exit_code(name)
            if own not in (None, 0, EXIT_RANK_LOST):
                if name not in self._said and not self._is_refused(name):  # `last_words` has the user's mistake
                    self._progress.warn(
                        f"{name} ended with code {named(own)}. {self._supervisor.last_words(name)}".rstrip()
                    )
                self._said.add(name)
                code = 2 if own == 2 else code
        return code

    def drain(self) -> None:
        """Ask rank 0 for a checkpoint and the end."""
        self._supervisor.signal(self._leader, signal.SIGTERM)

    def kill(self) -> None:
        self._is_killed_here = True
        self._supervisor.kill(self._leader)

    def last_words(self, code: int) -> str:
        """Describe the end of the learner: the exit code, the last line of output, and a probable cause.

        Of a user's mistake, give the line of the error alone.
        """
        refused = next((spec.name for spec in self._specs if self._is_refused(spec.name)), None)
        if refused is not None:
            return self._supervisor.last_words(refused) or f"{refused} ended with code 2"
        words = f"the learner ended with code {named(code)}. {self._supervisor.last_words(self._leader)}".rstrip()
        unsaved = self._killed_while_saving()
        return words if unsaved is None else words + _KILLED_WHILE_SAVING.format(checkpoint=unsaved)

    def restart(self, code: int) -> bool:
        """Restart all ranks from the newest checkpoint, while the workers go on; call again while they are dead.

        Give False if no restart is left since the last checkpoint, or if a restart would end in the same way: the disk
        refused the last checkpoint, or the learner was killed while writing a checkpoint for the second time. A start
        that fails is repeated later.
        """
        if time.monotonic() < self._start_at_s:
            return True
        try:
            if not self._restarting and not self._begin_restart(code):
                return False
            (self._folder / "summary.json").unlink(missing_ok=True)  # of the ranks before
            self.start()
        except OSError as error:
            self._num_failed_starts += 1
            self._start_at_s = time.monotonic() + backoff_s(self._num_failed_starts)
            if self._num_failed_starts == 1:
                self._progress.warn(f"the learner cannot be restarted: {error}; the launcher goes on trying")
            for spec in self._specs:  # ranks without the others
                self._supervisor.kill(spec.name)
            return True
        self._restarting, self._num_failed_starts = False, 0
        self._said.clear()
        return True

    def _is_refused(self, name: str) -> bool:
        return not self.has_restarted and self._supervisor.is_refused(name)

    def _begin_restart(self, code: int) -> bool:
        reached, killed = standing(folder_of(self._folder)), self._killed_while_saving() is not None
        if reached != self._began_from:
            self._num_restarts, self._was_killed_saving = 0, False
        repeats = self._supervisor.exit_code(self._leader) == EXIT_UNSAVED or (killed and self._was_killed_saving)
        if repeats or self._num_restarts >= self._max_restarts:
            return False
        self._num_restarts += 1
        self._began_from, self._was_killed_saving = reached, killed or self._was_killed_saving
        self._progress.warn(self.last_words(code))
        for spec in self._specs:
            self._supervisor.kill(spec.name)
        remove_unfinished(folder_of(self._folder))  # so that the next end is not explained by this checkpoint
        checkpoint = newest_checkpoint(self._folder)
        self._progress.go_back(reached.newest_version)
        self._progress.warn(
            f"the learner restarts from {checkpoint or 'the beginning, since there is no checkpoint yet'} "
            f"(restart {self._num_restarts} of {self._max_restarts})"
        )
        self._specs = tuple(
            msgspec.structs.replace(spec, command=(*(a for a in spec.command if a != "--resume"), "--resume"))
            for spec in self._specs
        )
        self._restarting = True
        return True

    def _killed_while_saving(self) -> str | None:
        """Name the checkpoint that was being written when a rank got a SIGKILL from outside; None otherwise."""
        codes = [self._supervisor.exit_code(spec.name) for spec in self._specs]
        of_followers = [code for code in codes[1:] if code not in (None, 0, EXIT_RANK_LOST)]
        if self._is_killed_here or KILLED not in (of_followers or codes[:1]):  # a lost follower has rank 0 killed
            return None
        return next((path.name for path in unfinished_checkpoints(folder_of(self._folder))), None)
