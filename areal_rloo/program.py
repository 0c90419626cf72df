"""How a program begins and ends: Ctrl-C, closed streams, mistakes of the user, the exit code. Imports quick modules."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

from areal_rloo.errors import ConfigError, UserError, shown
from areal_rloo.standard_streams import open_missing_streams, stop_printing

_OF_PATHS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENOSPC)
_ASKED = ContextVar("asked for its flags", default=False)
_NOTHING_STARTED = "stopped before anything had started"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a single line, as all errors of the user.

    `overrides`: options of a config may follow, which `parse_known_args` returns.
    """

    def __init__(self, *, overrides: bool = False, **arguments: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **arguments)
        self._more = " [key.path=value ...]" if overrides else ""

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        if _ASKED.get():
            raise _AskedError([*self._option_string_actions])
        return super().parse_known_args(*arguments, **named)

    def format_usage(self) -> str:
        return super().format_usage().rstrip("\n") + f"{self._more}\n"

    def format_help(self) -> str:
        usage = super().format_usage()
        return super().format_help().replace(usage, self.format_usage(), 1)

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ConfigError(f"{message}; expected {usage}")


def flags_of(main: Callable[[Sequence[str]], int]) -> list[str]:
    """Return the flags of a program, without running it."""
    token = _ASKED.set(True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--help"])
    except _AskedError as answer:
        return answer.flags
    except SystemExit:  # a program without a parser
        pass
    finally:
        _ASKED.reset(token)
    return []


class _AskedError(Exception):
    def __init__(self, flags: list[str]) -> None:
        self.flags = flags


def begin_imports() -> None:
    """Look for no cycles until `end_imports`: modules stay, and looking at them again takes a fifth of the imports."""
    gc.disable()


def end_imports() -> None:
    """Look for cycles again after `begin_imports`, but not among the modules. Their few cycles stay, too."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def end_on_interrupt() -> None:
    """End without a traceback on Ctrl-C. Call on the main thread, before slow imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background of a script
        signal.signal(signal.SIGINT, _end)


def run_main(main: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Call the main function of a program; print a `UserError` as a line, and return the exit code.

    Without `arguments`, those of the command line. From here on there may be something to clean up, so Ctrl-C raises
    KeyboardInterrupt.
    """
    open_missing_streams()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # by the starter: then no exit code of a child is known
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_imports()
    try:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except UserError as error:
        _say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        stop_printing()
        return 0
    except OSError as error:  # a path of the command line, or a full disk behind standard output
        if error.errno not in _OF_PATHS:
            raise
        _say(f"error: {shown(str(error.filename or 'standard output'))}: {error.strerror}")
        stop_printing()
        return 2
    except KeyboardInterrupt:
        _say(_NOTHING_STARTED)
        return 130
    return code


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"{_NOTHING_STARTED}\n".encode())
    finally:
        os._exit(128 + number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the face of the program
