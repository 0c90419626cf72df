"""Parts that every section of the config uses: the base struct, bounded numbers, hosts, URLs, paths, arguments."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from areal_rloo.errors import shown

_MOST_INT, _MOST_FLOAT = 2**62, 1e30  # sums of a few stay within 64 bits, and within the range of float32

_WHOLE_NAMES = frozenset({"gpus"})  # options of sbatch with which another option begins

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=_MOST_INT)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_MOST_INT)]
Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]  # of hosts, processes, devices, layers
CountOrNone = Annotated[int, msgspec.Meta(ge=0, le=4096)]
ManyCount = Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # of completions, prompts or connections at a time
MOST_LEASED = 2**16  # samples in a worker's slots, and ahead of them: a message must hold all samples of a worker
LeaseCount = Annotated[int, msgspec.Meta(ge=1, le=MOST_LEASED)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**24)]  # of a prompt, a completion or a row
# A holder of the keys can say Hello under any number of names. The work for a message grows with the number of workers:
# a tick takes 0.4 ms with this number, and four times as many workers would take a second for a second's heartbeats.
MOST_WORKERS = 1024
MOST_RANKS = 4096
# The word `auto` is read as 0; the launcher decides.
_AUTO = msgspec.Meta(ge=0, extra={"auto": True}, extra_json_schema={"auto": True})
AutoRanks = Annotated[int, _AUTO, msgspec.Meta(le=MOST_RANKS)]
AutoWorkers = Annotated[int, _AUTO, msgspec.Meta(le=MOST_WORKERS)]
AutoTokens = Annotated[int, _AUTO, msgspec.Meta(le=2**24)]
AutoSteps = Annotated[int, _AUTO, msgspec.Meta(le=_MOST_INT)]
AUTO = (AutoRanks, AutoWorkers, AutoTokens, AutoSteps)
# Texts such as 24GB, 80GiB and 24e9 are read as bytes.
Bytes = Annotated[int, msgspec.Meta(ge=0, le=_MOST_INT, extra={"bytes": True}, extra_json_schema={"bytes": True})]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=_MOST_FLOAT)]
# float32 tells no two logits of 8 apart that differ by less; below 1e-38, a logit / temperature is not finite.
LEAST_TEMPERATURE = 1e-6
Temperature = Annotated[float, msgspec.Meta(ge=LEAST_TEMPERATURE, le=_MOST_FLOAT)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=_MOST_FLOAT)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=30 * 86400)]  # up to 30 days
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Finite = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ProcessBytes = Annotated[int, msgspec.Meta(ge=2**28)]  # room for Python with torch
MessageBytes = Annotated[int, msgspec.Meta(ge=2**20, le=2**31 - 1)]  # room for the longest report of a failure


_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")  # of a host name
_BYTES = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:[eE]\d{1,2})?) ?(?:([KMGT])(i?))?B?")
_MOST_HOST, _MOST_PATH_BYTES, _MOST_PART_BYTES = 253, 1024, 255


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config file: immutable, keyword-only, no unknown keys."""


def bytes_of(text: str) -> int | None:
    """Read a size in bytes: 24000000000, 24e9, 24GB (10^9) or 24GiB (2^30); None for another text."""
    found = _BYTES.fullmatch(text)
    if found is None:
        return None
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """True for an address, or for a possible name of a host, which may not exist."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        named = all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()
        return named and len(text) <= _MOST_HOST
    return True


def host_mistakes(key: str, host: str) -> Iterator[str]:
    """Give an error for a text other than a host."""
    if not is_host(host):
        yield f"{key}: expected a host name or an address such as 127.0.0.1, got '{shown(host)}'"


def url_mistakes(key: str, url: str, *, instead: str) -> Iterator[str]:
    """Give an error for a text other than the URL of a server; `instead` of a password in the URL: advice."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # brackets without an address, a port above 65535
        good = False
    if not good or not url.isprintable() or " " in url:
        yield f"{key}: expected http://HOST:PORT or https://HOST:PORT, got '{shown(url)}'"
    elif "@" in parts.netloc:
        yield f"{key}: expected a URL without a name and a password, got '{shown(url)}'; leave them out, {instead}"
    elif "#" in url:
        yield f"{key}: expected a URL without a fragment, got '{shown(url)}'; leave out '#' and the text after '#'"


def path_mistakes(key: str, path: str | None) -> Iterator[str]:
    """Give an error for a text too long or too odd for a path; None is no path."""
    if path is None:
        return
    longest = max((len(os.fsencode(part)) for part in PurePath(path).parts), default=0)
    if not path.strip() or not path.isprintable():
        yield f"{key}: expected a path of visible characters, got '{shown(path)}'"
    elif longest > _MOST_PART_BYTES or len(os.fsencode(path)) > _MOST_PATH_BYTES:
        limits = f"{_MOST_PATH_BYTES} bytes, and {_MOST_PART_BYTES} for each part"
        yield f"{key}: expected a path of at most {limits}, got '{shown(path)}'; shorten it"


def argument_name(written: str) -> str:
    """The command-line spelling of an option: `--tp_size`, `tp_size` and `tp-size` all become `tp-size`."""
    return written.lstrip("-").replace("_", "-")


def owned_mistakes(key: str, arguments: Iterable[str], owned: Mapping[str, str]) -> Iterator[str]:
    """Give an error for each argument of another program that this package sets; `owned`: argument to advice."""
    for written in arguments:
        name = argument_name(written)
        advice = owned.get(name, owned.get(name.removeprefix("no-")))  # argparse: --no-NAME is the opposite of --NAME
        if advice is not None:
            yield f"{key}.{written}: not an option here: {advice}"
            continue
        # Programs take the beginning of a name for the name.
        whole = None if len(name) == 1 or name in _WHOLE_NAMES else next((o for o in owned if o.startswith(name)), None)
        if whole is not None:
            yield f"{key}.{written}: the beginning of {whole}, which is not an option here: {owned[whole]}"
