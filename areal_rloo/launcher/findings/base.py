"""A finding, and what the checks are told: a check takes a `Situation` and gives findings, one for each thing it saw.

`wrong` is what a run fails of, `unsure` what it may fail of or be slow for. What is wrong carries the error that a
launcher ends with.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from areal_rloo.config import Config
from areal_rloo.errors import PreflightError, UserError, first_line

T = TypeVar("T")

State = Literal["ok", "wrong", "unsure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw.

    Attributes:
        name: the config key it is about, or a noun.
        state: how that is.
        what: there is, in words.
        fix: what to do about it; empty where there is nothing to do.
        error: what a launcher raises for it, where it is wrong.
    """

    name: str
    state: State
    what: str
    fix: str = ""
    error: UserError | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Situation:
    """What checks are told.

    Attributes:
        config: of the run; None where only the machine is looked at.
        folder: the run folder to be; it need not be there.
        runs_here: whether the run will be on this host, or is only submitted from it.
        environment: variables as the run will have them.
    """

    config: Config | None = None
    folder: Path | None = None
    runs_here: bool = True
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


Check = Callable[[Situation], Iterator[Finding]]


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def unsure(name: str, what: str, fix: str) -> Finding:
    return Finding(name, "unsure", what, fix)


def wrong(name: str, what: str, fix: str, error: type[UserError] = PreflightError) -> Finding:
    return Finding(name, "wrong", what, fix, error(f"{name}: {what}; {fix}"))


def refused(name: str, error: UserError, *, fix: str) -> Finding:
    """What an error of ours says. Ours end with `; what to do`; `fix` is for those that have no such end."""
    what, semicolon, remedy = str(error).rpartition("; ")
    what = what.removeprefix(f"{name}: ") if semicolon else str(error).removeprefix(f"{name}: ")
    return Finding(name, "wrong", what, remedy if semicolon else fix, error)


def guarded(check: Check, situation: Situation) -> Iterator[Finding]:
    """A check's findings; where it fails itself, that is one."""
    try:
        yield from check(situation)
    except Exception as error:  # noqa: BLE001 - one check that cannot be made must not take the others with it
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield unsure(name, f"could not be checked: {type(error).__name__}: {first_line(error)}", "look at it by hand")


def raise_first(found: Iterable[Finding]) -> None:
    """Raise what the first wrong finding stands for; later checks are not made.

    Raises:
        UserError: something is wrong.
    """
    for finding in found:
        if finding.state == "wrong":
            raise finding.error or PreflightError(f"{finding.name}: {finding.what}; {finding.fix}")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of a call that has no deadline of its own, such as a look-up of a name.

    Raises:
        TimeoutError: it is not back; its thread ends whenever it does.
        Exception: what the call raised.
    """
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # a pair without an error has one


def size(num_bytes: float) -> str:
    """Bytes for people."""
    unit = next((u for u in ("B", "KiB", "MiB", "GiB") if num_bytes < 1024 ** (1 + _UNITS.index(u))), "TiB")
    return f"{num_bytes / 1024 ** _UNITS.index(unit):.4g} {unit}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
