"""The process of a managed server: start and kill the process.

The server runs below a keeper (`keeper.py`) in a separate session, so a signal to the session also ends the server's
children, even if these are stopped. If this process is killed, the keeper kills the server and all descendants: some
would live on alone, for example children that begin just then.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from areal_rloo.config import ServerConfig
from areal_rloo.engines.server.api import Arguments, ServerKind, ServerPlan
from areal_rloo.files import ScratchFolder, open_private
from areal_rloo.keeper import kept
from areal_rloo.ports import ReservedPorts
from areal_rloo.session_leader import SessionLeader
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import wait_until

logger = get_logger(__name__)

_KILL_TIMEOUT_S, _KEEPER_S = 30.0, 6.0  # a keeper kills for 5 s at most
_LOOK_EVERY_S = 0.02
_TAIL_BYTES = 64 * 1024
_ENTRY = re.compile(r"^(?=\[\d{4}-\d\d-\d\d |\(\w+ pid=)", re.MULTILINE)  # a log line and the traceback
_EXCEPTION = re.compile(r"\b\w+(Error|Exception): ")
_ERROR = re.compile(r"Error|ERROR|error:")


class ServerProcess:
    """A run of a server; `log` is appended to."""

    def __init__(self, kind: ServerKind, python: str, config: ServerConfig, plan: ServerPlan, log: Path) -> None:
        """Start the server. The calling thread must live as long as the server."""
        self._harmless = kind.harmless
        self._reserved = ReservedPorts(1)
        (self.port,) = self._reserved.ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.api_key = secrets.token_hex(16)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self._secrets = ScratchFolder(Path(tempfile.gettempdir()), "server")
        secrets_file = self._secrets.path / "secrets.yaml"
        command = kind.command(python, config.arguments, plan, port=self.port, config=secrets_file)
        try:
            with open_private(secrets_file, "wb") as file:
                file.write(f"api-key: {self.api_key}\n".encode())
            with open_private(log, "ab") as output:  # servers log their options, with the api key (`forget_secrets`)
                process = subprocess.Popen(
                    kept(command, bounded=False),
                    env=_changed(os.environ, kind.environment(plan)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self._clear()
            raise
        self._leader = SessionLeader(process)
        self.pid = process.pid  # of the keeper

    def exit_code(self) -> int | None:
        """Return the exit code; None while the server runs."""
        return self._leader.exit_code()

    def forget_secrets(self) -> None:
        """Remove the file with the api key, which the server has read, and the key from the log of the start."""
        self._secrets.close()
        with contextlib.suppress(OSError), self.log.open("r+b") as file:
            for found in re.finditer(self.api_key.encode(), file.read()):  # the launcher bounds the file
                file.seek(found.start())
                file.write(b"*" * len(self.api_key))  # the length stays: the server appends meanwhile

    def kill(self) -> None:
        """Kill the server with all descendants, and reap the keeper."""
        self._clear()
        self._leader.signal(signal.SIGCONT)
        self._leader.signal(signal.SIGTERM)  # the keeper also kills descendants with a session of their own
        wait_until(lambda: self.exit_code() is not None, timeout_s=_KEEPER_S, look_every_s=_LOOK_EVERY_S)
        if not self._leader.kill(_KILL_TIMEOUT_S):  # a hung system call, for example of a GPU driver
            text = "the server below process %d was killed and does not end; its device may stay in use"
            logger.error(text, self.pid)

    def last_words(self) -> str:
        """Return the last error in this run's log, or the last line if there is no error."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = self._log_start if self._log_start <= size else 0  # the launcher has left out a part since
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        entries = [entry for entry in _ENTRY.split(text) if not any(words in entry for words in self._harmless)]
        spoken = [line.strip() for entry in entries for line in entry.splitlines() if line.strip()]
        exceptions = [line for line in spoken if _EXCEPTION.search(line)]
        errors = [line for line in spoken if _ERROR.search(line)]
        return (exceptions or errors or spoken or ["nothing"])[-1][:500]

    def _clear(self) -> None:
        self.forget_secrets()
        self._reserved.close()


def _changed(variables: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables of a process; None leaves a variable out."""
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def in_words(options: Arguments) -> list[str]:
    """Return options of a command line: true is a bare flag; false and null leave an option out."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            is_whole = isinstance(value, float) and value.is_integer()  # servers read 1e6 as no whole number
            words += [f"--{name}", f"{value:.0f}" if is_whole else str(value)]
    return words
