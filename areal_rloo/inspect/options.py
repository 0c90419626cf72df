"""From the command line to what is asked for: every mistake is a DataError that says what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from areal_rloo.errors import DataError
from areal_rloo.inspect import trajectories_of
from areal_rloo.inspect.select import (
    FIELDS,
    PART,
    Condition,
    Order,
    Seen,
    Where,
    contains,
    did_you_mean,
    parse_order,
    parse_pattern,
    parse_sample,
    parse_steps,
    parse_where,
)
from areal_rloo.inspect.summary import By
from areal_rloo.inspect.text import View

_ANY = ""  # --dropped without a reason
_MOST = 10
_FIELDS = f"{', '.join(FIELDS)}, reward.NAME (a part of the reward)"
_EXAMPLES = """
why is the reward flat?
  python -m areal_rloo.inspect runs/latest --summary
  python -m areal_rloo.inspect runs/latest --where 'reward<0.5' --sort -tokens --limit 3
  python -m areal_rloo.inspect runs/latest --step 100: --where finish_reason=length
  python -m areal_rloo.inspect runs/latest --dropped reward_timeout
  python -m areal_rloo.inspect runs/latest --sample 40/3 --tokens
  python -m areal_rloo.inspect runs/latest --limit 0 --json | jq .reward_parts
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for; a `limit` of None is none."""

    path: Path
    conditions: Sequence[Condition]
    order: Order | None
    limit: int | None
    summary: By | None
    json: bool
    view: View
    source: str | None
    reason: str | None

    def check(self, seen: Seen) -> None:
        """Refuse names that only the records know and none of them has; asked once all have been seen."""
        if not seen.num_records:
            return
        wanted = [condition.name for condition in self.conditions if isinstance(condition, Where)]
        wanted += [] if self.order is None else [self.order.name]
        for name in wanted:
            part = name.removeprefix(PART)
            if part != name and part not in seen.parts:
                raise DataError(f"no trajectory has a reward part '{part}'; {did_you_mean(part, seen.parts)}")
        if self.source is not None and self.source not in seen.sources:
            raise DataError(f"--source: no trajectory is of '{self.source}'; {did_you_mean(self.source, seen.sources)}")
        if self.reason and self.reason not in seen.reasons:
            raise DataError(f"--dropped: none was for '{self.reason}'; {did_you_mean(self.reason, seen.reasons)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DataError(f"{message}; expected RUN_FOLDER and then options, which --help lists")


def parse_arguments(arguments: Sequence[str]) -> Options:
    """Read the command line, and find the run's file.

    Raises:
        DataError: an option or its value is wrong, or the folder has no trajectories.
    """
    asked = _parser().parse_args(_joined(arguments))
    pattern = None if asked.grep is None else parse_pattern(asked.grep)
    if asked.limit is not None and asked.limit < 0:
        raise DataError(f"--limit {asked.limit}: expected a number of trajectories, or 0 for all of them")
    most = 0 if asked.summary else _MOST
    return Options(
        path=trajectories_of(asked.run_folder),
        conditions=_conditions(asked) + ([] if pattern is None else [contains(pattern)]),
        order=None if asked.sort is None else parse_order(asked.sort),
        limit=(most if asked.limit is None else asked.limit) or None,
        summary=asked.summary,
        json=asked.json,
        view=View(tokens=asked.tokens, full=asked.full or pattern is not None, pattern=pattern),
        source=asked.source,
        reason=asked.dropped,
    )


def _conditions(asked: argparse.Namespace) -> list[Condition]:
    conditions: list[Condition] = [parse_where(text) for text in asked.where]
    if asked.step is not None:
        conditions.append(parse_steps(asked.step))
    if asked.sample is not None:
        conditions.append(parse_sample(asked.sample))
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
    return conditions


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--sort -tokens` as one word: argparse takes what begins with a dash for another option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in {"--sort", "--grep"} and not argument.startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m areal_rloo.inspect",
        description="Show the trajectories of a run: what the policy wrote, how it was rewarded, what became of it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest; the run may be in progress")
    which = parser.add_argument_group("which of them; all conditions must hold")
    which.add_argument(
        "--step", metavar="N|A:B", help="policy version they were trained on or dropped at; A to B, both"
    )
    which.add_argument("--group", type=int, metavar="ID", help="trajectories of one prompt")
    which.add_argument("--sample", metavar="GROUP/INDEX", help="one sample, as the first line of each names it")
    which.add_argument("--source", metavar="NAME", help="of one data source")
    fate = which.add_mutually_exclusive_group()
    fate.add_argument("--dropped", nargs="?", const=_ANY, metavar="REASON", help="dropped, for any or for one reason")
    fate.add_argument("--trained", action="store_true", help="trained on")
    which.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help=f"such as 'reward<0.5', in quotes; with < <= > >= = != and the fields {_FIELDS}; finish_reason with = "
        "and !=; what has no value meets no condition; repeatable",
    )
    which.add_argument("--grep", metavar="REGEX", help="in prompt or completion, which are then shown whole")
    order = parser.add_argument_group("in which order, and how many")
    order.add_argument("--sort", metavar="[-]FIELD", help="by a field of --where, with - the highest first")
    order.add_argument("--limit", type=int, metavar="N", help=f"default {_MOST}, without --sort the newest; 0: all")
    shape = parser.add_argument_group("how")
    shape.add_argument("--full", action="store_true", help="long prompts and completions whole")
    shape.add_argument("--tokens", action="store_true", help="a line for each token, with its version and logprob")
    other = shape.add_mutually_exclusive_group()
    other.add_argument("--json", action="store_true", help="the records as JSON lines, for jq")
    other.add_argument(
        "--summary",
        nargs="?",
        const="step",
        choices=("step", "source"),
        help="counts instead: number, mean reward, drops by reason, for each step or source",
    )
    return parser
