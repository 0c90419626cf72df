"""Write logs that read side by side: a line per record, in UTC, with the names of process and module.

A peer or a user's function can cause the same record again and again. So each line of our code writes at most
`MOST_LINES` records a minute, and then a record with the number of those left out. Control characters are escaped, and
further lines of a record are indented, so the text of a peer forges no record and no command of the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_rloo.errors import ArealRlooError, UserError, printable

MOST_LINES, MOST_MINUTE = 100, 200_000  # records and characters, of a line of code in a minute
STOPPED = "stopped by an error"  # begins the record of the last error of a process
TOLD = logging.CRITICAL + 10  # of records for the launcher to repeat, so no `telemetry.log_level` hides them
_WINDOW_S = 60.0
_MOST_CHARACTERS = 20_000  # of a record: more than the text of a peer and a traceback need

_NEXT_LINE = "\n    "  # so no line of foreign text looks like a record

_ROOT = "areal_rloo"


logging.addLevelName(TOLD, "NOTE")


def get_logger(name: str) -> logging.Logger:
    """Give the logger of a module; pass `__name__`."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def setup_logs(process_name: str, *, level: str, file: Path | None, to_stderr: bool = False) -> None:
    """Append this process's records to a file and, if asked, write them to standard error. Call once, at start."""
    formatter = _SafeFormatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process_name} %(module)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    root = logging.getLogger(_ROOT)
    root.setLevel(level.upper())
    root.propagate = False
    others = logging.getLogger("asyncio")  # logs the errors of callbacks, and of tasks that are never awaited
    for handler in list(root.handlers):
        root.removeHandler(handler)
        others.removeHandler(handler)
        handler.close()
    outputs: list[logging.Handler] = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        outputs.append(logging.FileHandler(file, encoding="utf-8"))
    if to_stderr:
        outputs.append(logging.StreamHandler(sys.stderr))
    for output in outputs:
        output.setFormatter(formatter)
    limited = LimitedHandler(outputs)  # without a handler, logging writes to stderr
    root.addHandler(limited)
    others.addHandler(limited)


@dataclass(slots=True)
class _Window:
    """The records of one line of code, since the first of them."""

    first: logging.LogRecord
    ends_s: float
    num: int = 0
    num_left_out: int = 0
    num_characters: int = 0


class LimitedHandler(logging.Handler):
    """Passes on up to `MOST_LINES` records and `MOST_MINUTE` characters a minute of each line of code."""

    def __init__(self, outputs: Sequence[logging.Handler], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._outputs, self._clock = outputs, clock
        self._windows: dict[tuple[str, int], _Window] = {}  # one for each place in our code

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on, or count it. Called under the lock of this handler."""
        now_s = self._clock()
        self._close_windows(now_s)
        place = (record.pathname, record.lineno)
        window = self._windows.setdefault(place, _Window(record, now_s + _WINDOW_S))
        window.num += 1
        if window.num > MOST_LINES or window.num_characters > MOST_MINUTE:
            window.num_left_out += 1
            return
        window.num_characters += min(len(record.getMessage()), _MOST_CHARACTERS)
        self._pass(record)

    def flush(self) -> None:
        for output in self._outputs:
            output.flush()

    def close(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._close_windows(float("inf"))
            for output in self._outputs:
                output.close()
        super().close()

    def _close_windows(self, now_s: float) -> None:
        ended = [place for place, window in self._windows.items() if window.ends_s <= now_s]
        for place in ended:
            window = self._windows.pop(place)
            if window.num_left_out:
                first, text = window.first, "left out %d records within a minute like: %s"
                arguments = (window.num_left_out, first.getMessage()[:_MOST_CHARACTERS])
                told = (first.name, first.levelno, first.pathname, first.lineno, text, arguments, None)
                self._pass(logging.LogRecord(*told))

    def _pass(self, record: logging.LogRecord) -> None:
        for output in self._outputs:
            output.handle(record)


class _SafeFormatter(logging.Formatter):
    """Bounds a record, escapes control characters, and indents all lines but the first."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        text = _NEXT_LINE.join("\t".join(map(printable, line.split("\t"))) for line in lines)
        half = _MOST_CHARACTERS // 2  # the end has the cause of an exception
        if len(text) <= _MOST_CHARACTERS:
            return text
        return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


def run_to_exit_code(run: Callable[[], int]) -> int:
    """Run a process. Write our own errors to the log, and a single line to stderr."""
    logger = get_logger(__name__)
    try:
        return run()
    except UserError as error:
        logger.error("%s: %s", STOPPED, error)
        _tell(f"error: {printable(str(error))}")
        return error.exit_code
    except ArealRlooError as error:
        logger.exception("%s: %s", STOPPED, error)  # a full disk may keep only the first line
        _tell(f"error: {printable(str(error))}")
        return error.exit_code


def _tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - users read this line
    except OSError:  # a full disk must not change the exit code, neither here nor at the last flush
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
