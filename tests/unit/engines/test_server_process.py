"""The kill of a server's process reaches all descendants."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import eventually
from support.processes import processes_with

from areal_rloo.config import ServerConfig
from areal_rloo.engines.server.process import ServerProcess, in_words

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has child subreapers")

# A descendant with a session of its own, as a daemon of the user's container may have.
SERVER = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(3600)", sys.argv[1]]
subprocess.Popen(sleep, start_new_session=True)
time.sleep(3600)
"""


class _Kind:
    harmless = ()

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def command(self, python: str, *_: Any, **__: Any) -> list[str]:
        return [python, "-c", SERVER, self._mark]

    def environment(self, _: Any) -> dict[str, str | None]:
        return {}


def test_a_kill_reaches_descendants_in_sessions_of_their_own(tmp_path: Path) -> None:
    kind: Any = _Kind(str(tmp_path / "mark"))
    plan: Any = None
    server = ServerProcess(kind, sys.executable, ServerConfig(), plan, tmp_path / "log")
    eventually(lambda: len(processes_with([kind._mark])) == 3, "keeper, server and its descendant run")
    server.kill()
    assert server.exit_code() is not None
    assert processes_with([kind._mark]) == []


def test_whole_floats_are_written_as_servers_read_whole_numbers() -> None:
    options = {"max-total-tokens": 1e6, "share": 0.5, "flag": True, "off": False, "none": None, "name": "1e6"}
    assert in_words(options) == ["--max-total-tokens", "1000000", "--share", "0.5", "--flag", "--name", "1e6"]
