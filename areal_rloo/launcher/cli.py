"""The command line every launcher shares, and how its mistakes end: one line, exit code 2, nothing started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ConfigError, UserError


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    config: Config
    dry_run: bool
    resume: bool


def parse(launcher: str, arguments: Sequence[str]) -> Options:
    """Read `--config NAME.yaml [key.path=value ...] [--key.path=value ...] [--dry-run] [--resume]`.

    Raises:
        ConfigError: the config or an override is wrong.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m areal_rloo.launcher.{launcher}",
        description="Overrides follow as key.path=value or --key.path=value, e.g. algorithm.max_staleness=0.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="a path, or the name of a shipped config")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, start nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run")
    known, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if "=" not in argument:
            raise ConfigError(f"argument '{argument}': expected key.path=value, --dry-run or --resume")
    return Options(load_config(known.config, rest), known.dry_run, known.resume)


def run_main(main: Callable[[Sequence[str]], int]) -> int:
    """Call a launcher's main with the command line's arguments; the user's mistakes become exit code 2."""
    try:
        return main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the face of the program
        return 2
