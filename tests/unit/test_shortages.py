"""A machine that lacks something for a moment is no mistake of the user: exit code 1, and a launcher tries again."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE_S, eventually
from support.processes import processes_with

from areal_rloo.errors import ConfigError, HostLostError, ModelError, UserError
from areal_rloo.keeper import TRY_AGAIN, was_killed
from areal_rloo.program import run_main
from areal_rloo.telemetry.logs import run_to_exit_code


def _raised(number: int, *, explicit: bool) -> UserError:
    try:
        try:
            try:
                raise OSError(number, os.strerror(number), "model.safetensors")
            except OSError as error:
                raise ValueError("no weights") from error
        except ValueError as error:
            if explicit:
                raise ModelError("model.path: cannot be read") from error
            raise ModelError("model.path: cannot be read")  # noqa: B904 - the cause is known all the same
    except ModelError as error:
        return error


def _fails(error: UserError) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    ("number", "code"), [(errno.EMFILE, 1), (errno.ENFILE, 1), (errno.ESTALE, 1), (errno.ENOENT, 2), (errno.EACCES, 2)]
)
def test_the_exit_code_follows_the_cause(number: int, code: int, explicit: bool) -> None:
    error = _raised(number, explicit=explicit)
    assert run_to_exit_code(_fails(error)) == code
    assert run_main(lambda _: _fails(error)(), []) == code


def test_a_hidden_cause_does_not_count() -> None:
    """Another process holds a lock, for example: `from None`."""
    with pytest.raises(ConfigError) as caught:
        try:
            raise BlockingIOError(errno.EAGAIN, "locked")
        except BlockingIOError:
            raise ConfigError("in use") from None
    assert caught.value.exit_code == 2


def test_errors_without_a_cause_keep_their_codes() -> None:
    error = ConfigError("a wrong key")
    error.__cause__ = error  # a loop must not hang
    assert (error.exit_code, HostLostError("gone").exit_code) == (2, 1)


KEEPER = Path(sys.modules["areal_rloo.keeper"].__file__ or "")
_WITHOUT = """
import os, runpy, sys, _thread
def refuses(*_): raise {error}
{what} = refuses
sys.argv = [{keeper!r}, str(os.getppid()), "bounded", sys.executable, "-c", "import time; time.sleep(3600)", {mark!r}]
runpy.run_path({keeper!r}, run_name="__main__")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has keepers")
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("os.fork", "BlockingIOError(11, 'no process')"),
        ("_thread.start_new_thread", "RuntimeError('no thread')"),
        ("os.pipe", "OSError(24, 'no descriptor')"),
    ],
)
def test_a_keeper_that_cannot_begin_asks_for_another_try(tmp_path: Path, what: str, error: str) -> None:
    code = _WITHOUT.format(what=what, error=error, keeper=str(KEEPER), mark=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S, check=False, text=True)
    assert was_killed(done.returncode)
    assert done.returncode == TRY_AGAIN
    assert "a keeper cannot keep: " in done.stdout
    eventually(lambda: not processes_with([str(tmp_path)]), "nothing is left")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has keepers")
def test_a_keeper_ends_although_its_starter_ignores_the_ends_of_children() -> None:
    code = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
command = [sys.executable, {str(KEEPER)!r}, str(os.getpid()), "bounded", sys.executable, "-c", "print('done')"]
keeper = subprocess.Popen(command)
keeper.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S, check=False, text=True)
    assert done.stdout == "done\n"


def test_a_program_knows_exit_codes_although_its_starter_ignores_them() -> None:
    code = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from areal_rloo.program import run_main
from areal_rloo.session_leader import SessionLeader

def main(_):
    leader = SessionLeader(subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], start_new_session=True))
    while (code := leader.exit_code()) is None:
        pass
    return code

sys.exit(run_main(main, []))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=PATIENCE_S, check=False).returncode == 7
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has keepers")
def test_the_command_of_a_check_ends_with_the_launcher(tmp_path: Path) -> None:
    code = f"""
import sys
from areal_rloo.launcher.doctor.base import last_line
last_line([sys.executable, "-c", "import time; time.sleep(3600)", {str(tmp_path)!r}], timeout_s=3600.0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def commands() -> list[psutil.Process]:
        return processes_with([str(tmp_path)])

    with subprocess.Popen([sys.executable, "-c", code], env=environment) as launcher:
        try:
            eventually(lambda: len(commands()) == 2, "keeper and command")
        finally:
            launcher.kill()
    eventually(lambda: not commands(), "nothing is left")
    assert launcher.returncode == -signal.SIGKILL
    assert commands() == []
