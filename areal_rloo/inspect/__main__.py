"""The command: a run folder and conditions in, trajectories out on the terminal or into a pipe.

Every mistake on the command line is a DataError with the expected form.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.console import Console
from rich.text import Text

from areal_rloo.config import check_run
from areal_rloo.errors import DataError, UserError
from areal_rloo.inspect import select
from areal_rloo.inspect.shown import visible_line
from areal_rloo.inspect.text import By, View, show, table, tallied
from areal_rloo.program import Parser, run_main
from areal_rloo.telemetry.trace import MOST_BYTES
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryRecord, read_trajectories
from areal_rloo.trace.joined import read_traces
from areal_rloo.trace.lives import life_of
from areal_rloo.trajectory import SampleId

_UNWRAPPED = 10_000  # columns; a pipe gets whole lines
_ANY = ""  # --dropped without a reason
_MOST = 10
_FIELDS = f"{', '.join(select.FIELDS)}, reward.NAME (part of the reward)"
_EXAMPLES = """
why is the reward flat?
  areal-rloo inspect runs/latest --summary
  areal-rloo inspect runs/latest --where 'reward<0.5' --sort -tokens --limit 3
  areal-rloo inspect runs/latest --step 100: --where finish_reason=length
  areal-rloo inspect runs/latest --dropped reward_timeout
  areal-rloo inspect runs/latest --sample 40/3 --tokens
  areal-rloo inspect runs/latest --life 40/3
  areal-rloo inspect runs/latest --limit 0 --json | jq .reward_parts
"""


class _Console(Console):
    """Let `main` handle a broken pipe, in every version of rich."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UserError: an argument or the folder is wrong.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    try:
        _look(parse_arguments(arguments))
    except UserError as error:
        raise type(error)(visible_line(str(error))) from error
    except KeyboardInterrupt:
        return 130
    return 0


def _look(options: Options) -> None:
    if options.life is not None:
        life = life_of(read_traces(options.run_folder), options.life)
        if not life:
            name = "/".join(map(str, options.life))
            most = f"each process traces its first {MOST_BYTES >> 20} MiB"
            raise DataError(f"--life {name}: expected a sample of the traces; {most}")
        print("\n".join(life))  # noqa: T201
        return
    seen = select.Seen()
    console = _Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNWRAPPED
    records = select.matching(read_trajectories(options.path), options.conditions, seen)
    if options.summary is None:
        chosen = select.selected(records, order=options.order, limit=options.limit)
        if not isinstance(chosen, Iterator):  # all records were read, so check before printing
            options.check(seen)
        for record in chosen:
            if options.json:
                _print_json(record)
            else:
                show(console, record, options.view)
        options.check(seen)
        closing = _closing(seen, f"{min(options.limit or seen.num_matching, seen.num_matching):,} of ")
    else:
        tallies = tallied(records, options.summary)
        options.check(seen)
        lines = list(tallies.items())[-(options.limit or 0) :]
        if lines:
            console.print(table(dict(lines), options.summary))
        closing = _closing(seen, f"the last {len(lines):,} lines of " if len(lines) < len(tallies) else "")
    if not options.json:
        console.print(Text(closing, style="dim"), soft_wrap=True)


def _print_json(record: TrajectoryRecord) -> None:
    line = msgspec.json.encode(record).decode()
    if sys.stdout.isatty():  # escape control characters that JSON allows
        line = json.dumps(json.loads(line))
    sys.stdout.write(line + "\n")


def _closing(seen: select.Seen, shown: str) -> str:
    if not seen.num_records:
        return "no trajectories yet"
    if not seen.num_matching:
        return f"none of the {seen.num_records:,} trajectories recorded so far matches"
    return f"{shown}{seen.num_matching:,} that match, of {seen.num_records:,} recorded"


class Options(argparse.Namespace):
    """The parsed command line: the options of `_parser`, and the values made of several options."""

    run_folder: Path
    life: SampleId | None
    path: Path
    conditions: list[select.Condition]
    order: select.Order | None
    limit: int | None  # None: no limit
    summary: By | None
    view: View

    def check(self, seen: select.Seen) -> None:
        """Refuse names that no record has. Call after reading all records."""
        if not seen.num_records:
            return
        fields = [by.name for by in (*self.conditions, self.order) if isinstance(by, select.Where | select.Order)]
        parts = [part for name in fields if (part := select.part_of(name)) is not None]
        for name, mistake, known in (
            *((part, f"no trajectory has a reward part '{part}'", seen.parts) for part in parts),
            (self.source, f"--source: no trajectory from '{self.source}'", seen.sources),
            (self.dropped or None, f"--dropped: no drop for '{self.dropped}'", seen.reasons),
        ):
            if name is not None and name not in known:
                raise DataError(f"{mistake}; {select.did_you_mean(name, known)}")


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message}; expected RUN_FOLDER and then options, which --help lists")


def parse_arguments(arguments: Sequence[str]) -> Options:
    """Parse the command line, and find the run's file.

    Raises:
        DataError: an option or a value is wrong, or the folder has no trajectories.
    """
    asked = _parser().parse_args(_joined(arguments), namespace=Options())
    if asked.life is not None:
        check_run(asked.run_folder)
        return asked
    if asked.limit is None:
        asked.limit = 0 if asked.summary else _MOST
    if asked.limit < 0:
        raise DataError(f"--limit {asked.limit}: expected a number of trajectories, or 0 for all of them")
    asked.limit = asked.limit or None
    asked.path = _trajectories_of(asked.run_folder)
    asked.conditions = _conditions(asked)
    asked.view = View(tokens=asked.tokens, full=asked.full or asked.grep is not None, pattern=asked.grep)
    return asked


def _trajectories_of(folder: Path) -> Path:
    check_run(folder)
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(
            f"{folder}: no {FILE_NAME}: expected after the first train step of a run with "
            "telemetry.trajectories_per_step above 0"
        )
    return path


def _conditions(asked: Options) -> list[select.Condition]:
    conditions = [*asked.where, *(condition for condition in (asked.step, asked.sample) if condition is not None)]
    if asked.group is not None:
        conditions.append(lambda record: record.group_id == asked.group)
    if asked.source is not None:
        conditions.append(lambda record: record.source == asked.source)
    if asked.dropped is not None:
        conditions.append(
            lambda record: record.dropped is not None if asked.dropped == _ANY else record.dropped == asked.dropped
        )
    if asked.trained:
        conditions.append(lambda record: record.advantage is not None)
    if asked.grep is not None:
        conditions.append(select.contains(asked.grep))
    return conditions


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join `--sort -tokens` into a single word, because argparse reads a leading dash as another option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in {"--sort", "--grep"} and not argument.startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="areal-rloo inspect",
        description="Show the trajectories of a run: prompt, completion, reward, advantage, staleness, drop reason.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest; may be in progress")
    which = parser.add_argument_group("filters; all conditions must hold")
    which.add_argument(
        "--step", type=select.parse_steps, metavar="N|A:B", help="policy version at training or drop; A to B, inclusive"
    )
    which.add_argument("--group", type=int, metavar="ID", help="trajectories of a prompt")
    which.add_argument(
        "--sample", type=select.parse_sample, metavar="GROUP/INDEX", help="as in the first line of a trajectory"
    )
    which.add_argument("--source", metavar="NAME", help="trajectories of a data source")
    fate = which.add_mutually_exclusive_group()
    fate.add_argument("--dropped", nargs="?", const=_ANY, metavar="REASON", help="dropped trajectories, or of a reason")
    fate.add_argument("--trained", action="store_true", help="trajectories trained on")
    which.add_argument(
        "--where",
        type=select.parse_where,
        action="append",
        default=[],
        metavar="CONDITION",
        help=f"such as 'reward<0.5', in quotes; with < <= > >= = != and the fields {_FIELDS}; finish_reason with = "
        "and !=; a trajectory without a value meets no condition; repeatable",
    )
    which.add_argument(
        "--grep", type=select.parse_pattern, metavar="REGEX", help="search prompt and completion, and show both in full"
    )
    order = parser.add_argument_group("order and number")
    order.add_argument(
        "--sort", dest="order", type=select.parse_order, metavar="[-]FIELD", help="a field of --where; -: highest first"
    )
    order.add_argument("--limit", type=int, metavar="N", help=f"default {_MOST}; without --sort the newest; 0: all")
    shape = parser.add_argument_group("format")
    shape.add_argument("--full", action="store_true", help="do not shorten long prompts and completions")
    shape.add_argument("--tokens", action="store_true", help="a line for each token, with version and logprob")
    other = shape.add_mutually_exclusive_group()
    other.add_argument("--json", action="store_true", help="the records as JSON lines, for jq")
    other.add_argument(
        "--life",
        type=select.parse_life,
        metavar="GROUP/INDEX",
        help="instead the life of a sample, from lease to step; needs telemetry.trace=true",
    )
    other.add_argument(
        "--summary",
        nargs="?",
        const="step",
        choices=("step", "source"),
        help="a table instead: number, mean reward and drops by reason, for each step or source",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
