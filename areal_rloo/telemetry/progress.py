"""Print the progress of a run: a live line on a terminal, plain lines elsewhere. The launcher passes the records."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from areal_rloo.errors import printable
from areal_rloo.standard_streams import patient, stop_printing
from areal_rloo.telemetry.bound import WINDOW, bound_of
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

logger = get_logger(__name__)

_PLAIN_EVERY_S = 2.0
_MOST_FIXED = 1e12  # larger numbers are written with an exponent


class RunConsole(Console):
    """A console that lets the run go on when its reader is gone, or stands still: the launcher must watch the run.

    Rich would end the process, or wait.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(file=patient(sys.stdout), quiet=quiet)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        stop_printing()


class Progress:
    """Prints the state of a run. Use as a context manager."""

    def __init__(
        self,
        console: Console,
        *,
        num_train_steps: int,
        eval_set: str = "",
        health: Callable[[Record], list[str]] = lambda record: [],
        unsaved: Callable[[], str] = lambda: "a checkpoint could not be written",
    ) -> None:
        """`eval_set`: the evaluation set in the line, if any. `health` gives lines to say of the run's health after a
        record. `unsaved` describes the last failed checkpoint.
        """
        self._console = console
        self._unsaved = unsaved
        self.num_wanted = 0  # rollout workers
        self._num_train_steps, self._health = num_train_steps, health
        self._eval_set = eval_set
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._train: TrainRecord | None = None
        self._recent: deque[TrainRecord] = deque(maxlen=WINDOW + 1)
        self._evals: list[EvalRecord] = []  # of `eval_set`
        self._num_failed = 0  # checkpoints, according to the last train record
        self._printed_s = -_PLAIN_EVERY_S

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays; the text may come from a process's output."""
        text = printable(text)
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a character that the terminal does not know
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line that stays, also in the log; a quiet run prints the line on standard error."""
        logger.warning("%s", text)
        if self._console.quiet:
            with contextlib.suppress(OSError, ValueError):
                print(printable(text), file=sys.stderr, flush=True)  # noqa: T201 - users read this line
        else:
            self.say(text)

    def recall(self, records: list[Record], *, version: int, evaluated_after: int = -1) -> None:
        """Take the records of an earlier launcher, up to the version of the resume; print nothing.

        `evaluated_after`: the version of the last change of the evaluation set.
        """
        for record in records:
            least = -1 if isinstance(record, TrainRecord) else evaluated_after
            if least < record.policy_version <= version:
                self._keep(record)

    def go_back(self, version: int) -> None:
        """Forget the steps after a version: a learner that restarts from this version takes them again."""
        if self._forget(version) and self._live is not None:
            self._live.update(Text(f"step {max(0, version)}/{self._num_train_steps}"), refresh=True)

    def _forget(self, version: int) -> bool:
        """Forget the records after a version; return True if there was a train step."""
        self._evals = [record for record in self._evals if record.policy_version <= version]
        if self._train is None or self._train.policy_version <= version:
            return False
        self._train = None
        self._recent.clear()
        return True

    def show(self, records: list[Record]) -> None:
        """Print the new records."""
        for record in records:
            num_failed = self._num_failed
            lines = self._keep(record)
            if isinstance(record, EvalRecord):
                self.say(evaluation_line(record))
            elif record.failed_checkpoints > num_failed:
                self.warn(self._unsaved())
            for line in lines:
                self.warn(line)
        if self._train is None or not records:
            return
        if self._live is not None:
            self._live.update(Text(self.line(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif any(isinstance(record, TrainRecord) for record in records):
            done = self._train.num_train_steps == self._num_train_steps
            if done or time.monotonic() - self._printed_s >= _PLAIN_EVERY_S:
                self._printed_s = time.monotonic()
                self.say(self.line())

    def _keep(self, record: Record) -> list[str]:
        """Take a record; return what to say of the run's health."""
        if isinstance(record, TrainRecord):
            if self._train is not None and record.policy_version <= self._train.policy_version:
                self._forget(record.policy_version - 1)  # the learner restarted from an earlier version
            self._train, self._num_failed = record, record.failed_checkpoints
            self._recent.append(record)
        elif record.name == self._eval_set:
            self._evals.append(record)
        return self._health(record)

    def line(self) -> str:
        """Give the state as a line."""
        train = self._train
        assert train is not None, "no train step yet"
        left = self._num_train_steps - train.num_train_steps
        eta_s = left * train.wall_s / max(1, train.num_train_steps)
        eta = f"{int(eta_s) // 60}:{int(eta_s) % 60:02d}" if 0 <= eta_s < _MOST_FIXED else "-"
        newest = f"{self._evals[-1].result[1]:.3f}@v{self._evals[-1].policy_version}" if self._evals else "-"
        bound = bound_of([*self._recent])
        dropped = sum(train.ledger.dropped.values()) / max(1, train.ledger.admitted)
        return (
            f"step {train.num_train_steps}/{self._num_train_steps}  epoch {_fixed(train.epoch, 2)}  ETA {eta}  "
            f"reward {_fixed(train.reward_mean, 3)}  eval {newest}  {_fixed(train.trained_tokens_per_s, 0)} tok/s  "
            f"staleness {_fixed(train.staleness_mean, 2)} (max {train.staleness_max})"
            f"{f'  dropped {100 * dropped:.0f} %' if dropped >= 0.005 else ''}"
            f"{f'  {train.num_workers} of {self.num_wanted} workers' if train.num_workers < self.num_wanted else ''}"
            f"{'' if bound is None else f'  {bound.name} ({bound.waits})'}"
        )


def _fixed(value: float, num_digits: int) -> str:
    return f"{value:.3g}" if abs(value) >= _MOST_FIXED else f"{value:,.{num_digits}f}"


def evaluation_line(record: EvalRecord) -> str:
    """Give the result of an evaluation as a line."""
    name, number = record.result
    line = f"evaluation: version {record.policy_version}, {record.name} {name} {_fixed(number, 3)}"
    if name != "accuracy" and not math.isnan(record.accuracy):
        line += f", accuracy {record.accuracy:.3f}"
    if record.num_samples > 1:
        line += f", pass@{record.num_samples} {record.pass_share:.3f}, maj@{record.num_samples} "
        line += "-" if math.isnan(record.majority_share) else f"{record.majority_share:.3f}"
    if record.num_failed > 0:
        line += f", {record.num_failed} without a reward"
    return line
