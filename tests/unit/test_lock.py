"""One learner a run folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.learner import lock

HOLDS = "import sys, time; from pathlib import Path; from areal_rloo.learner.lock import lock_run_folder\n"


def test_a_second_learner_is_refused_until_the_first_is_gone_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-uc", f"{HOLDS}lock_run_folder(Path(sys.argv[1])); print(1); time.sleep(100)", str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    assert first.stdout is not None
    first.stdout.readline()
    assert lock.is_in_use(tmp_path)
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.2)
    with pytest.raises(PreflightError, match=r"is in use by another learner; wait for its end"):
        lock.lock_run_folder(tmp_path)
    first.kill()
    first.wait()
    first.stdout.close()
    assert not lock.is_in_use(tmp_path)
    lock.lock_run_folder(tmp_path)
