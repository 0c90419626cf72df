"""The trial of the user's episode: on a running loop, in a process that ends with everything the episode started."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import PATIENCE_S

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.rollout.trial import try_own_episode

_RUN = "    async def run(self, sample, engine, rewards, chat): ...\n"


def _config(folder: Path, constructor: str) -> Config:
    path = folder / "mine.py"
    path.write_text(f"class Mine:\n    def __init__(self, config):\n        {constructor}\n{_RUN}")
    return load_config("quickstart.yaml", (f"rollout.episode.type={path}:Mine",))


def _made(config: Config) -> bool:
    return try_own_episode(config, timeout_s=PATIENCE_S)


def test_an_episode_may_need_a_running_loop(tmp_path: Path) -> None:
    assert _made(_config(tmp_path, "import aiohttp; self.http = aiohttp.ClientSession()"))


def test_a_thread_of_an_episode_does_not_keep_the_launcher(tmp_path: Path) -> None:
    hangs = "import signal, threading; signal.signal(15, signal.SIG_IGN)\n"
    hangs += "        threading.Thread(target=threading.Event().wait).start()"
    assert _made(_config(tmp_path, hangs))


def test_a_port_of_an_episode_is_free_after_the_trial(tmp_path: Path) -> None:
    with socket.socket() as sample:
        sample.bind(("127.0.0.1", 0))
        port = sample.getsockname()[1]
    binds = f"import os, socket; s = socket.create_server(('127.0.0.1', {port})); s.set_inheritable(True)\n"
    binds += "        if os.fork() == 0: os.setsid(); os.execvp('sleep', ['sleep', '1000'])"
    assert _made(_config(tmp_path, binds))
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("raises", "shown"),
    [
        ("import asyncio; raise asyncio.CancelledError('x')", "CancelledError: x"),
        ("raise KeyboardInterrupt('x')", "KeyboardInterrupt: x"),
        ("raise GeneratorExit('x')", "GeneratorExit: x"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_every_exception_of_a_constructor_is_one_line(tmp_path: Path, raises: str, shown: str) -> None:
    config = _config(tmp_path, raises)
    with pytest.raises(ConfigError) as caught:
        _made(config)
    path = tmp_path / "mine.py"
    expected = f"rollout.episode.type: {path}:Mine cannot be made from the config: {shown} ({path}:3)"
    assert str(caught.value) == expected


def test_a_constructor_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Mine ends the process that makes it from the config: code 7"):
        _made(_config(tmp_path, "import os; os._exit(7)"))


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_trial_that_was_killed_says_nothing_about_the_episode(tmp_path: Path, number: str) -> None:
    killed = f"import os, signal; os.kill(os.getpid(), signal.{number})"
    assert not _made(_config(tmp_path, killed))


def test_a_trial_without_a_free_descriptor_says_nothing_about_the_episode(tmp_path: Path) -> None:
    assert not _made(_config(tmp_path, "import errno; raise OSError(errno.EMFILE, 'no descriptor')"))


def test_a_slow_constructor_is_accepted_and_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    slow = f"import pathlib, os, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    assert not try_own_episode(_config(tmp_path, slow), timeout_s=5.0)
    if started.exists():  # a busy machine may have reached the timeout before
        assert not Path(f"/proc/{started.read_text()}").exists()


def test_a_dry_run_accepts_an_episode_with_a_thread(tmp_path: Path) -> None:
    _config(tmp_path, "import threading; threading.Thread(target=threading.Event().wait).start()")
    command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", "--dry-run"]
    command.append(f"rollout.episode.type={tmp_path / 'mine.py'}:Mine")
    assert subprocess.run(command, check=False, timeout=PATIENCE_S, capture_output=True).returncode == 0
