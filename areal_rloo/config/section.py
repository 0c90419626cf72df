"""Parts that every section of the config uses: the base struct, bounded numbers, and two checks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
AutoInt = Annotated[int, msgspec.Meta(ge=0, extra={"auto": True})]  # the word `auto` is read as 0; the launcher decides
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Finite = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ProcessBytes = Annotated[int, msgspec.Meta(ge=2**28)]  # room for Python with torch
MessageBytes = Annotated[int, msgspec.Meta(ge=2**20, le=2**31 - 1)]  # room for the longest report of a failure


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config file: immutable, keyword-only, no unknown keys."""


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def argument_name(written: str) -> str:
    """The command-line spelling of an option: `--tp_size`, `tp_size` and `tp-size` all become `tp-size`."""
    return written.lstrip("-").replace("_", "-")


def owned_mistakes(key: str, arguments: Iterable[str], owned: Mapping[str, str]) -> Iterator[str]:
    """Give an error for each argument of another program that this package sets; `owned`: argument to advice."""
    for written in arguments:
        name = argument_name(written)
        if name in owned:
            yield f"{key}.{written}: not an option here: {owned[name]}"
