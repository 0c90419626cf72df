"""The command line of looking: a run folder and conditions in, trajectories out on the terminal or into a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from areal_rloo.errors import UserError
from areal_rloo.inspect.options import Options, parse_arguments
from areal_rloo.inspect.select import Seen, matching, selected
from areal_rloo.inspect.shown import visible_line
from areal_rloo.inspect.summary import table, tallied
from areal_rloo.inspect.text import show
from areal_rloo.telemetry.trajectories import TrajectoryRecord, read_trajectories

_INTERRUPTED = 130
_UNWRAPPED = 10_000  # columns; the reader of a pipe wraps for itself


class _Console(Console):
    """Leaves a broken pipe to `main`, in every version of rich."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError


def main(arguments: Sequence[str]) -> int:
    """Show what was asked for; the user's mistakes are one line and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 shows what it can
    try:
        _look(parse_arguments(arguments))
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {visible_line(str(error))}", file=sys.stderr)  # noqa: T201 - the face of the program
        return 2
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not meet the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _look(options: Options) -> None:
    seen = Seen()
    console = _Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNWRAPPED
    records = matching(read_trajectories(options.path), options.conditions, seen)
    if options.summary is None:
        chosen = selected(records, order=options.order, limit=options.limit)
        if not isinstance(chosen, Iterator):  # all have been seen, and nothing is printed yet
            options.check(seen)
        num_shown = _print_json(chosen) if options.json else _print_blocks(console, chosen, options)
        options.check(seen)
        closing = _closing(seen, f"{num_shown:,} of ")
    else:
        tallies = tallied(records, options.summary)
        options.check(seen)
        lines = list(tallies.items())[-(options.limit or 0) :]
        if lines:
            console.print(table(dict(lines), options.summary))
        closing = _closing(seen, f"the last {len(lines):,} lines of " if len(lines) < len(tallies) else "")
    if not options.json:
        console.print(Text(closing, style="dim"), soft_wrap=True)


def _print_blocks(console: Console, records: Iterable[TrajectoryRecord], options: Options) -> int:
    num_shown = 0
    for record in records:
        show(console, record, options.view)
        num_shown += 1
    return num_shown


def _print_json(records: Iterable[TrajectoryRecord]) -> int:
    num_shown = 0
    for record in records:
        line = msgspec.json.encode(record).decode()
        if sys.stdout.isatty():  # JSON lets some control characters be
            line = json.dumps(json.loads(line))
        sys.stdout.write(line + "\n")
        num_shown += 1
    return num_shown


def _closing(seen: Seen, shown: str) -> str:
    if not seen.num_records:
        return "no trajectories yet"
    if not seen.num_matching:
        return f"none of the {seen.num_records:,} trajectories recorded so far matches"
    return f"{shown}{seen.num_matching:,} that match, of {seen.num_records:,} recorded"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
