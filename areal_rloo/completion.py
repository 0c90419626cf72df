"""`areal-rloo completion bash|zsh`: a script that completes programs, flags, shipped configs, options and their values.

The script asks `areal-rloo completion words ...` with the words of the command line up to the cursor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from areal_rloo.config.load import shipped_configs
from areal_rloo.config.options import find, options
from areal_rloo.launcher.run import LAUNCHERS
from areal_rloo.program import Parser, flags_of

_BASH = """\
_areal_rloo() {
    local IFS=$'\\n'
    COMPREPLY=($(areal-rloo completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} != 1 || ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _areal_rloo areal-rloo
"""
_SCRIPTS = {"bash": _BASH, "zsh": f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{_BASH}"}
_TAKE_OPTIONS = ("quickstart", "run", "resume", "sweep", "doctor", "advise", "evaluate", "generate", "sft", "offline")


def main(arguments: Sequence[str]) -> int:
    """Print the script of a shell, or the words that may stand at the cursor.

    Raises:
        ConfigError: the shell is unknown.
    """
    if arguments[:1] == ["words"]:
        print("\n".join(candidates(arguments[1:])))  # noqa: T201 - the shell reads this
        return 0
    parser = Parser(prog="areal-rloo completion", description='In ~/.bashrc: eval "$(areal-rloo completion bash)"')
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    print(_SCRIPTS[parser.parse_args(arguments).shell], end="")  # noqa: T201 - the shell reads this
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Return the words that may replace the last word, for which the shell splits `key=value` into three words."""
    *before, last = words or [""]
    return sorted({candidate for candidate in _all(before, last) if candidate.startswith("" if last == "=" else last)})


def _all(before: Sequence[str], last: str) -> Iterator[str]:
    from areal_rloo.__main__ import PROGRAMS  # noqa: PLC0415 - which names this module

    if not before:
        yield from PROGRAMS
    elif last.startswith("-") and before[0] in PROGRAMS:
        yield from flags_of(importlib.import_module(PROGRAMS[before[0]].module).main)
    elif last == "=" or before[-1] == "=":
        key = ([*before, last] if last == "=" else before)[-2:][0]
        yield from (word for option in find(key) if option.key == key for word in option.choices)
    elif before[-1] == "--config":
        yield from (path.name for path in shipped_configs())
    elif before[-1] == "--launcher":
        yield from LAUNCHERS
    elif before[0] in _TAKE_OPTIONS:
        yield from (f"{option.key}=" for option in options() if last)
    elif before == ["config", "show"]:
        yield from (option.key for option in options())
    elif before == ["config"]:
        yield from ("diff", "page", "schema", "show")
    elif before[0] == "completion":
        yield from _SCRIPTS
