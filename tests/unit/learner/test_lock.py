"""The locks of a run folder: a single launcher, a single learner."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.start import hold
from areal_rloo.learner.lock import Patience, Role, is_in_use, lock_run_folder, wait_for_learner

HOLDS = """
import sys, time
from pathlib import Path
from areal_rloo.learner.lock import Patience, lock_run_folder
lock_run_folder(Path(sys.argv[1]), sys.argv[2], Patience(0.0, print))
print("held")
time.sleep(100)
"""


@contextmanager
def held(folder: Path, role: Role) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock until the process ends."""
    command = [sys.executable, "-uc", HOLDS, str(folder), role]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other
        other.kill()


def test_a_second_learner_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    lines: list[str] = []
    with held(tmp_path, "learner"):
        assert is_in_use(tmp_path)
        with pytest.raises(PreflightError, match=r"is in use by another learner; wait for its end"):
            lock_run_folder(tmp_path, "learner", Patience(0.3, lines.append))
        with pytest.raises(PreflightError, match=r"is in use by another learner; wait for its end"):
            wait_for_learner(tmp_path, Patience(0.0, lines.append))
        lock_run_folder(tmp_path, "launcher", Patience(0.0, lines.append))  # its own
    assert lines == [f"{tmp_path} is in use by another learner; waiting up to 0 s for its end"]
    assert not is_in_use(tmp_path)
    lock_run_folder(tmp_path, "learner", Patience(0.0, lines.append))


def test_the_wait_ends_when_the_other_holder_ends(tmp_path: Path) -> None:
    with held(tmp_path, "learner") as other:
        threading.Timer(0.3, other.kill).start()
        wait_for_learner(tmp_path, Patience(60.0, print))
        lock_run_folder(tmp_path, "learner", Patience(0.0, print))
    assert is_in_use(tmp_path), "by us"


def test_the_wait_can_be_stopped(tmp_path: Path) -> None:
    with held(tmp_path, "learner"), pytest.raises(PreflightError):
        wait_for_learner(tmp_path, Patience(1e9, print, stops=lambda: True))


def test_a_start_writes_nothing_while_another_launcher_runs(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", ["launcher.drain_timeout_s=0.2"])
    with held(tmp_path, "launcher"), pytest.raises(PreflightError, match="is in use by another launcher"):
        hold(tmp_path, config, resume=False)
    assert [path.name for path in tmp_path.iterdir()] == [".launcher-lock"]


def test_the_second_of_two_starts_in_a_folder_is_refused(tmp_path: Path) -> None:
    """Both launchers found the folder empty before the first write."""
    config = load_config("quickstart.yaml", [])
    with held(tmp_path, "launcher") as other:
        (tmp_path / "checkpoints" / "step-000000").mkdir(parents=True)
        threading.Timer(0.3, other.kill).start()
        with pytest.raises(PreflightError, match="holds a run already; add --resume"):
            hold(tmp_path, config, resume=False)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"run\.folder: .* cannot be written: .*; choose another"):
        hold(tmp_path / "file" / "run", load_config("quickstart.yaml", []), resume=False)
