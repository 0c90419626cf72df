"""`areal-rloo migrate FILE`: print a config of ours for another system's file, and a line for every setting.

The config goes to standard output, the report to standard error. Exit code 0, also if the user must add something.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

from areal_rloo.errors import ConfigError, shown
from areal_rloo.migrate.reading import read
from areal_rloo.migrate.translate import RULES, Line, Translation, translate
from areal_rloo.migrate.trl_steps import PROCESSES
from areal_rloo.program import Parser, run_main

_DESCRIPTION = """\
Translate a YAML file of AReaL or verl, a verl command, or a script of TRL or ms-swift. Nothing in the file is run.

examples:
  areal-rloo migrate gsm8k_rloo.yaml > my.yaml
  areal-rloo migrate run_qwen3_8b_fsdp.sh > my.yaml
  areal-rloo migrate rloo.py --processes 8 > my.yaml
  areal-rloo run --config my.yaml --dry-run"""
_MOST_ITEMS = 20
_LEFT = ("hand", "unknown")  # fates
_REFUSED = "TO_DO: make this config complete, then remove this line"
_TITLES = {
    "to": "translated:",
    "none": "not needed here:",
    "hand": "to do by hand:",
    "unknown": "unknown to this command:",
}


def main(arguments: Sequence[str]) -> int:
    """Print the config and the report.

    Raises:
        UserError: the file cannot be read.
    """
    parser = Parser(prog="areal-rloo migrate", description=_DESCRIPTION)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--from", dest="system", choices=sorted(RULES), help="default: as the file looks")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="of a TRL script, a GPU each; default: as it says, or 1"
    )
    options = parser.parse_args(arguments)
    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"argument '--processes': expected at least 1, got {options.processes}")
    found = read(options.file, options.system)
    if options.processes is not None:
        found = msgspec.structs.replace(found, settings=found.settings | {PROCESSES: options.processes})
    translation = translate(found)
    left = [f"left out, because another command trains: {shown(command)}" for command in found.others]
    left += [f"not read, add its options by hand: {shown(word)}" for word in found.unread]
    sys.stderr.write("\n".join([*report(found.system, translation), *left]) + "\n")
    sys.stderr.flush()
    print(f"# From {shown(options.file.name)} of {found.system}, by areal-rloo migrate.")  # noqa: T201 - the output
    refused = f"{_REFUSED}\n" if translation.refusal else ""  # with our defaults in the gaps, another task would run
    print("".join(remarks(translation)) + refused + as_yaml(translation), end="")  # noqa: T201
    return 0


def as_yaml(translation: Translation) -> str:
    """Write the config, a short section or list in a line."""
    return yaml.safe_dump(translation.tree, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def remarks(translation: Translation) -> Iterator[str]:
    """Give a comment of the config for everything to do by hand: a file outlives the report on the terminal."""
    for line in translation.lines:
        if line.fate in _LEFT:
            yield f"# {_TITLES[line.fate]} {_setting(line)}{'; ' if line.why else ''}{line.why}\n"
    if translation.refusal:
        yield f"# the config is not complete: {shown(translation.refusal)}\n"


def report(system: str, translation: Translation) -> Iterator[str]:
    """Give a line for every setting, grouped by the fate of the setting."""
    width = min(60, max((len(line.name) for line in translation.lines), default=0))
    for fate, title in _TITLES.items():
        lines = [line for line in translation.lines if line.fate == fate]
        if lines:
            yield f"{title}  ({len(lines)} of {len(translation.lines)} settings of {system})"
        for line in lines:
            words = f"{', '.join(line.keys)}{': ' if line.keys and line.why else ''}{line.why}"
            yield f"  {_setting(line):<{width}}  {words}".rstrip()
    if translation.refusal:
        yield f"the config is not complete: {translation.refusal}"


def _setting(line: Line) -> str:
    """Write a setting with its value; of a long list only the beginning."""
    value = line.value[:_MOST_ITEMS] if isinstance(line.value, list) else line.value
    return shown(f"{line.name}={value}")


if __name__ == "__main__":
    sys.exit(run_main(main))
