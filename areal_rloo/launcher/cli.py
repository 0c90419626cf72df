"""The command line every launcher shares, and how its mistakes end: one line, exit code 2, nothing started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_rloo.config import Config, import_entry, load_config
from areal_rloo.errors import ConfigError, UserError


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for; `of_launcher` are the options that one launcher alone has."""

    config: Config
    dry_run: bool
    as_json: bool
    resume: bool
    of_launcher: dict[str, Any]


def parse(
    launcher: str, arguments: Sequence[str], *, extend: Callable[[argparse.ArgumentParser], None] | None = None
) -> Options:
    """Read `[SCRIPT.py] --config NAME.yaml [key.path=value ...] [--key.path=value ...] [--dry-run] [--resume] ...`.

    A script in front of everything else is the entry, as `--entry` names it, and is imported here already.

    Args:
        launcher: the module's name.
        arguments: of the command line.
        extend: adds options that this launcher alone has.

    Raises:
        ConfigError: the config, an override or the entry is wrong.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m areal_rloo.launcher.{launcher}",
        description="Overrides follow as key.path=value or --key.path=value, e.g. algorithm.max_staleness=0.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="a path, or the name of a shipped config")
    parser.add_argument("--entry", help="a script or module of yours, imported by every process; may stand first")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: the plan alone, as JSON")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run")
    common = {"config", "entry", "dry_run", "json", "resume"}
    if extend is not None:
        extend(parser)
    if arguments and arguments[0].endswith(".py"):
        arguments = ["--entry", *arguments]
    known, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if "=" not in argument:
            raise ConfigError(
                f"argument '{argument}': expected key.path=value, --dry-run, --json, --resume or --entry SCRIPT.py"
            )
    if known.json and not known.dry_run:
        raise ConfigError("argument '--json': expected with --dry-run, whose plan it prints; add --dry-run")
    overrides = rest if known.entry is None else [*rest, f"run.entry={known.entry}"]
    config = load_config(known.config, overrides)
    import_entry(config.run.entry)
    of_launcher = {name: value for name, value in vars(known).items() if name not in common}
    return Options(config, known.dry_run, known.json, known.resume, of_launcher)


def run_main(main: Callable[[Sequence[str]], int]) -> int:
    """Call a launcher's main with the command line's arguments; the user's mistakes become exit code 2."""
    try:
        return main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the face of the program
        return 2
    except KeyboardInterrupt:
        print("stopped before anything had started", file=sys.stderr)  # noqa: T201
        return 130
