"""The learner's ranks as one thing: they start together, end together, and begin anew together from a checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from areal_rloo.errors import EXIT_RANK_LOST
from areal_rloo.launcher.plan import Plan
from areal_rloo.launcher.run_folder import newest_checkpoint
from areal_rloo.launcher.supervisor import Supervisor
from areal_rloo.telemetry.progress import Progress

_GRACE_S = 5.0


class LearnerRanks:
    """Ranks of one plan, under a supervisor."""

    def __init__(self, plan: Plan, supervisor: Supervisor, folder: Path, progress: Progress) -> None:
        self._specs = plan.learner
        self._max_restarts = plan.max_learner_restarts
        self._supervisor = supervisor
        self._folder = folder
        self._progress = progress
        self._num_restarts = 0
        self._began_from: str | None = None

    @property
    def leader(self) -> str:
        """Rank 0, which decides."""
        return self._specs[0].name

    @property
    def followers(self) -> list[str]:
        return [spec.name for spec in self._specs[1:]]

    def start(self) -> None:
        for spec in self._specs:
            self._supervisor.start(spec)

    def exit_code(self) -> int | None:
        """Of rank 0; None while it runs. A learner that lost another rank can neither train nor save, and may be
        waiting for a batch and not know it yet: then it is ended here."""
        if any(self._supervisor.exit_code(name) for name in self.followers):
            self._supervisor.wait([self.leader], _GRACE_S)  # it may know, and say more
            self._supervisor.kill(self.leader)
        return self._supervisor.exit_code(self.leader)

    def drain(self) -> None:
        """Ask for a checkpoint and the end."""
        self._supervisor.signal(self.leader, signal.SIGTERM)

    def kill(self) -> None:
        self._supervisor.kill(self.leader)

    def finish(self, code: int) -> int:
        """Wait for the others once rank 0 has ended with this code; gives the one that tells what happened."""
        self._supervisor.wait(self.followers, _GRACE_S)
        if code in (0, 2):
            return code
        for name in self.followers:
            own = self._supervisor.exit_code(name)
            if own not in (None, 0, EXIT_RANK_LOST):
                self._progress.warn(f"{name} ended with code {own}. {self._supervisor.last_words(name)}".rstrip())
                code = 2 if own == 2 else code
        return code

    def last_words(self, code: int) -> str:
        """How the learner ended, in a line."""
        return f"the learner ended with code {code}. {self._supervisor.last_words(self.leader)}".rstrip()

    def begin_anew(self, code: int) -> bool:
        """Start again from the newest checkpoint, while the workers go on; False when that was tried too often since
        the last checkpoint."""
        checkpoint = newest_checkpoint(self._folder)
        self._num_restarts = self._num_restarts if checkpoint == self._began_from else 0
        if self._num_restarts >= self._max_restarts:
            return False
        self._num_restarts += 1
        self._began_from = checkpoint
        for spec in self._specs:
            self._supervisor.kill(spec.name)
        self._progress.warn(self.last_words(code))
        self._progress.warn(
            f"it begins anew from {checkpoint or 'the beginning, since there is no checkpoint yet'} "
            f"(restart {self._num_restarts} of {self._max_restarts})"
        )
        self._specs = tuple(
            msgspec.structs.replace(spec, command=(*(a for a in spec.command if a != "--resume"), "--resume"))
            for spec in self._specs
        )
        self.start()
        return True
