"""Tell Prometheus where the processes of a run serve /metrics: a file for each, which `file_sd_configs` reads.

A process writes its file when it serves, and removes the file when it ends well. The file of a crashed process stays,
so Prometheus finds the target down, until the run starts again or has ended well. All runs share a folder, because
Prometheus accepts a pattern for file names alone. A link in the run folder leads there from any working folder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_rloo.config import Config
from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.ports import host_and_port
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_EVERYWHERE = ("0.0.0.0", "::")
_LINK = "targets"  # in the run folder


class Group(msgspec.Struct):
    """An entry of a file, in the form of Prometheus."""

    targets: list[str]
    labels: dict[str, str]


class Target(NamedTuple):
    """A process with metrics."""

    process: str
    url: str


class Targets:
    """The files of a run."""

    def __init__(self, config: Config, run_folder: Path) -> None:
        """No file is written if `targets_folder` is null."""
        folder, self._host = config.telemetry.targets_folder, config.telemetry.metrics_host
        self._run, self._configured = run_folder.resolve(), None if folder is None else _absolute(Path(folder))
        self._is_relative = folder is not None and not Path(folder).is_absolute()
        try:
            self._folder: Path | None = (self._run / _LINK).readlink()
        except OSError:  # none, or one that another start replaces now
            self._folder = self._configured
        self._run_id = f"{zlib.crc32(bytes(self._run)):08x}"  # folders can have equal names
        self._prefix = f"{self._run.name}-{self._run_id}."

    def begin(self) -> None:
        """Begin a start of the run: remove the files of the last one.

        A relative folder stays the one of the first start, where a Prometheus looks, also from another working folder.
        """
        self.remove()
        link = self._run / _LINK
        if self._is_relative and link.is_symlink():
            return
        self._folder = self._configured
        try:
            if link.is_symlink():  # else a file or a folder of the user
                link.unlink()
            if self._folder is not None and self._folder.parent.resolve() / self._folder.name != link:
                link.symlink_to(self._folder)
        except OSError as error:
            logger.warning("%s cannot be made, so only this working folder finds the metrics: %s", link, error)

    def add(self, process: str, port: int) -> None:
        """Write the file of a process; a disk without room costs the file alone."""
        if self._folder is None:
            return
        host = _own_address() if self._host in _EVERYWHERE else self._host
        labels = {"run": self._run.name, "run_id": self._run_id, "process": process}
        entry = {"targets": [host_and_port(host, port)], "labels": labels}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{self._prefix}{process}.json", json.dumps([entry]).encode())
        except OSError as error:
            logger.warning("Prometheus does not find this process: %s; set telemetry.targets_folder", error)

    def groups(self) -> list[Group]:
        """Read the entries of all processes of the run, those that crashed included."""
        found: list[Group] = []
        for path in () if self._folder is None else sorted(self._folder.glob(f"{_literal(self._prefix)}*.json")):
            with contextlib.suppress(OSError, DecodeError):  # it has ended since
                found += from_json(read_regular(path), list[Group])
        return found

    def read(self) -> list[Target]:
        """Read where the processes of the run serve their metrics."""
        named = [group for group in self.groups() if "process" in group.labels]
        return [Target(one.labels["process"], f"http://{target}/metrics") for one in named for target in one.targets]

    def remove(self, process: str = "*") -> None:
        """Remove the file of a process that has ended well; by default those of all processes of the run."""
        for path in () if self._folder is None else self._folder.glob(f"{_literal(self._prefix)}{process}.json"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s stays, although the process has ended: %s", path, error)


def _absolute(folder: Path) -> Path:
    """Return the path from the root; the path as it is if the working folder was removed since."""
    try:
        return folder.absolute()
    except FileNotFoundError:
        return folder


def _own_address() -> str:
    """Return the address of this host, or the name if the name stands for loopback; no name server knows a pod."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):  # a name of over 63 characters is none for a name server
        return name
    return name if address.startswith("127.") else address


def _literal(text: str) -> str:
    """Return a pattern that matches this text alone."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)
