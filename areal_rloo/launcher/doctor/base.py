"""A finding, and the input of a check: a check takes a `Situation` and gives a finding for each thing it looked at.

`wrong`: the run will fail. `unsure`: the run may fail or be slow. A wrong finding carries the error of a launcher.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError, UserError, first_line
from areal_rloo.keeper import kept
from areal_rloo.launcher.hosts import host_to_show
from areal_rloo.launcher.placement import Host

State = Literal["ok", "wrong", "unsure"]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: a config key or a noun, the facts, advice, and the exception of a wrong finding."""

    name: str
    state: State
    what: str
    fix: str = ""
    error: UserError | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a check: the config, and a folder that may not exist yet.

    `runs_here`: True if the run will use this host, False if this host only submits the run.
    """

    config: Config = field(default_factory=Config)
    folder: Path | None = None
    runs_here: bool = True
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def host(self) -> Host:
        """This host, with GPUs as described if the config asks for more GPUs than are here; `check_gpus` counts them.

        Raises:
            PreflightError: the driver does not answer.
        """
        return host_to_show(self.config.launcher)[0]

    @property
    def describes_gpus(self) -> bool:
        """True if the GPUs of `host` are described, because the config asks for more than are here; raises alike."""
        return bool(host_to_show(self.config.launcher)[1])

    @property
    def hosts(self) -> list[Host]:
        """The hosts of the run, all like this host; raises like `host`."""
        host = self.host
        more = range(1, self.config.launcher.num_hosts)
        return [host, *(dataclasses.replace(host, name=f"{host.name}, number {index + 1}") for index in more)]


Check = Callable[[Situation], Iterator[Finding]]


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def unsure(name: str, what: str, fix: str) -> Finding:
    return Finding(name, "unsure", what, fix)


def wrong(name: str, what: str, fix: str, error: type[UserError] = PreflightError, *, absent: bool = False) -> Finding:
    """Make a wrong finding; `absent`: see `UserError`."""
    return Finding(name, "wrong", what, fix, error(f"{name}: {what}; {fix}", absent=absent))


def wrong_or_unsure(name: str, what: str, fix: str, *, is_wrong: bool) -> Finding:
    return wrong(name, what, fix) if is_wrong else unsure(name, what, fix)


def refused(name: str, error: UserError, *, fix: str) -> Finding:
    """Make a finding of an error. Most messages end with `; advice`; `fix` is the advice for all others."""
    what, semicolon, remedy = str(error).removeprefix(f"{name}: ").rpartition("; ")
    return Finding(name, "wrong", what if semicolon else remedy, remedy if semicolon else fix, error)


def guarded(check: Check, situation: Situation) -> Iterator[Finding]:
    """Give the findings of a check; an exception of the check becomes a finding too."""
    try:
        yield from check(situation)
    except Exception as error:  # noqa: BLE001 - a broken check must not stop the other checks
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield unsure(name, f"could not be checked: {type(error).__name__}: {first_line(error)}", "look at it by hand")


def raise_first(found: Iterable[Finding]) -> None:
    """Raise the error of the first wrong finding; skip the later checks.

    Raises:
        UserError: a finding is wrong.
    """
    for finding in found:
        if finding.error is not None:
            raise finding.error


def last_line(
    command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[bool, str]:
    """Run a command; give True and the last line of the output, or False and the last line of the error."""
    try:
        kept_command = kept(command, bounded=False)  # ends with this process, also on its death
        done = subprocess.run(
            kept_command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"not done within {timeout_s:g} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"


def size(num_bytes: float) -> str:
    """Format a number of bytes with a unit."""
    power = next((power for power in range(4) if num_bytes < 1024 ** (1 + power)), 4)
    return f"{num_bytes / 1024**power:.4g} {_UNITS[power]}"
