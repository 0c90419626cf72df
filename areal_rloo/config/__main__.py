"""`areal-rloo config show|diff|schema|page`: the options of a config file, from the structs of this package."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.config.load import load_config
from areal_rloo.config.options import Option, find, groups, json_schema, options
from areal_rloo.config.other_names import OURS
from areal_rloo.config.schema import Config
from areal_rloo.errors import ConfigError, shown
from areal_rloo.program import Parser, run_main

_PAGE = """# Options

Every key of a config file, written by `areal-rloo config page` from `areal_rloo/config/`.
On a command line an option is `key.path=value`; `key.path+=value` appends to a list, and `~key.path` removes a key or a
position of a list. In a key, N stands for a position in a list, from 0. `areal-rloo config show KEY` prints the same
for one key or section, and `--dry-run` of a launcher the resolved config.
Editors read `configs/schema.json`; each shipped config names it in the first line.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ConfigError: a key or a config is wrong.
    """
    parser = Parser(prog="areal-rloo config", description="The options of a config file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    show = commands.add_parser("show", help="print options: values, default, meaning")
    show.add_argument("key", nargs="?", metavar="KEY", help="an option or a section; default: all")
    diff = commands.add_parser("diff", help="print the options that differ")
    for name in ("first", "second"):
        diff.add_argument(name, metavar="CONFIG", help="a file, a shipped config, or a run folder")
    commands.add_parser("schema", help="print the JSON schema, for editors")
    commands.add_parser("page", help="print docs/options.md")
    asked = parser.parse_args(arguments)
    match asked.command:
        case "show":
            text = "\n".join(_shown(asked.key or ""))
        case "diff":
            text = "\n".join(differences(_config(asked.first), _config(asked.second)) or ["no option differs"])
        case "schema":
            text = json.dumps(json_schema(), indent=1)
        case _:
            text = page()
    print(text)  # noqa: T201 - the output of the command
    return 0


def differences(first: Config, second: Config) -> list[str]:
    """Return a line for each option that differs: the key, the first value, the second."""
    before, after = (dict(_leaves(msgspec.to_builtins(config), "")) for config in (first, second))
    keys = dict.fromkeys((*before, *after))
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]


def page() -> str:
    """Return docs/options.md."""
    parts = [_PAGE]
    for group in groups():
        parts.append(f"## {group.key}\n" + (f"\n{group.meaning}\n" if group.meaning else ""))
        rows = (
            f"| `{_name(option, group.key)}` | {_cell(option.values)} | `{option.default}` | {_cell(option.meaning)} |"
            for option in group.options
        )
        parts.append("\n".join(("| option | values | default | meaning |", "|---|---|---|---|", *rows)) + "\n")
    return "\n".join(parts).rstrip()


def _shown(key: str) -> Iterator[str]:
    key = re.sub(r"\.\d+(?=\.|$)", ".N", key)  # a position in a list
    found = find(key) if key else options()
    if not found:
        known = [option.key for option in options()]
        last = key.rpartition(".")[2]
        same = sorted(
            (name for name in known if name.rpartition(".")[2] == last), key=lambda name: name.startswith("model.tiny.")
        )
        close = same or [OURS[last]] if same or last in OURS else difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see `areal-rloo config show`"
        raise ConfigError(f"'{shown(key)}': no such option or section; {hint}")
    for option in found:
        yield f"{option.key}: {option.values}; default {option.default}"
        yield f"    {option.meaning}"


def _config(name: str) -> Config:
    inside = Path(name) / "config.yaml"
    return load_config(str(inside) if inside.is_file() else name)


def _leaves(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for name, child in tree.items():
            yield from _leaves(child, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple) and any(isinstance(child, dict) for child in tree):
        for index, child in enumerate(tree):
            yield from _leaves(child, f"{key}.{index}")
    else:
        yield key, json.dumps(tree, ensure_ascii=False)


def _name(option: Option, section: str) -> str:
    return option.key.removeprefix(f"{section}.")


def _cell(text: str) -> str:
    return text.removesuffix(".").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(run_main(main))
