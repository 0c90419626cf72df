"""`areal-rloo run [--launcher local|slurm|ray] --config X.yaml ...`: call the launcher with the other arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from areal_rloo.errors import ConfigError, shown

_OPTION = "--launcher"
LAUNCHERS = {
    "local": "areal_rloo.launcher.local",
    "slurm": "areal_rloo.launcher.slurm.__main__",
    "ray": "areal_rloo.launcher.ray.__main__",
}


def main(arguments: Sequence[str]) -> int:
    """Run the launcher of the arguments; return the exit code.

    Raises:
        UserError: the launcher is unknown, or refuses to start.
    """
    name, rest = launcher_of(arguments)
    launch: Callable[[Sequence[str]], int] = importlib.import_module(LAUNCHERS[name or "local"]).main
    return launch(rest)


def launcher_of(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--launcher NAME` or `--launcher=NAME` out of the arguments; None if it is absent.

    Raises:
        ConfigError: no launcher has this name, or two are named.
    """
    names, rest = [], []
    words = iter(arguments)
    for word in words:
        if word == _OPTION:
            names.append(next(words, ""))
        elif word.startswith(f"{_OPTION}="):
            names.append(word.removeprefix(f"{_OPTION}="))
        else:
            rest.append(word)
    if len(names) > 1 or not set(names) <= set(LAUNCHERS):
        got = ", ".join(shown(name) for name in names) or "nothing"
        raise ConfigError(f"argument '{_OPTION}': expected one of {', '.join(LAUNCHERS)}, got {got}")
    return (names[0] if names else None), rest
