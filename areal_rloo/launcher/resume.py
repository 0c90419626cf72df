"""`areal-rloo resume [RUN_FOLDER] [key=value ...]`: start a run again from the newest checkpoint.

The launcher and the config are those of the last start; options that follow are changed for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_rloo.config import check_launched, is_override, override_of
from areal_rloo.errors import ConfigError
from areal_rloo.files import read_regular
from areal_rloo.launcher import run
from areal_rloo.launcher.run import LAUNCHERS, launcher_of
from areal_rloo.launcher.run_folder import newest_submitted
from areal_rloo.program import Parser
from areal_rloo.telemetry.code_state import STARTS_NAME, newest_start

_LATEST = "runs/latest"
_EXAMPLES = """
examples:
  areal-rloo resume
  areal-rloo resume runs/gsm8k-20260102-030405 learner.num_train_steps=500
  areal-rloo resume runs/latest --dry-run"""


class _Start(msgspec.Struct):
    """A line of environment.jsonl."""

    launcher: str


def main(arguments: Sequence[str]) -> int:
    """Resume a run; return the exit code of the launcher.

    Raises:
        UserError: there is no run, or a launcher refuses to start.
    """
    if {"-h", "--help"} & set(arguments):
        _parser().parse_args(["--help"])
    launcher, rest = launcher_of(arguments)
    named = bool(rest) and not rest[0].startswith("-") and (not is_override(rest[0]) or Path(rest[0]).exists())
    folder, others = (Path(rest[0]), rest[1:]) if named else (Path(_LATEST), rest)
    folder = folder.resolve()
    submitted = newest_submitted(folder)
    if submitted is None:
        check_launched(folder)
    config = folder / "config.yaml" if submitted is None else submitted
    launcher = launcher or (_recorded(folder) if submitted is None else "slurm")
    return run.main(
        [f"--launcher={launcher}", "--config", str(config), override_of("run.folder", folder), "--resume", *others]
    )


def _recorded(folder: Path) -> str:
    """Return the launcher of the last start.

    Raises:
        ConfigError: no start is recorded.
    """
    try:
        start = newest_start(read_regular(folder / STARTS_NAME), _Start)
    except OSError:
        start = None
    if start is None or start.launcher not in LAUNCHERS:
        names = ", ".join(LAUNCHERS)
        raise ConfigError(f"{folder}: {STARTS_NAME} names no launcher; say --launcher with one of {names}")
    return start.launcher


def _parser() -> Parser:
    parser = Parser(
        prog="areal-rloo resume",
        description="Start a run again from the newest checkpoint, with the launcher and the config of the last start.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_folder", nargs="?", metavar="RUN_FOLDER", help=f"default: {_LATEST}")
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), help="another launcher than the last")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options to change")
    return parser
