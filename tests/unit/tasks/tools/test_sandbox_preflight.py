"""If this machine cannot lock programs, an error names the missing feature and nothing runs."""

import asyncio
import sys
from pathlib import Path

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools import landlock, sandbox
from areal_rloo.tasks.tools.sandbox import SandboxLimits, SandboxResult, check_sandbox, run_python


@pytest.fixture
def has_landlock() -> None:
    try:
        landlock.landlock_version()
    except PreflightError as error:
        pytest.skip(str(error))


def _run(code: str) -> SandboxResult:
    return asyncio.run(run_python(code, SandboxLimits()))


def test_systems_other_than_linux_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PreflightError, match="needs Linux for its sandbox, got darwin"):
        check_sandbox()


def test_a_kernel_without_landlock_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "CREATE_RULESET", 4000)
    with pytest.raises(PreflightError, match=r"needs Landlock for its sandbox .*; run on Linux 5\.13 or later"):
        check_sandbox()
    with pytest.raises(PreflightError, match="needs Landlock"):
        _run("print(1)")


@pytest.mark.usefixtures("has_landlock")
@pytest.mark.parametrize("lock", ["ruleset", "seccomp_filter"])
def test_a_failed_lock_raises_and_runs_nothing(lock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = landlock if lock == "ruleset" else sandbox
    monkeypatch.setattr(module, lock, lambda *_, **__: b"\xff" * 8)
    for check in (check_sandbox, lambda: _run("print(1)")):
        with pytest.raises(PreflightError, match=r"nothing was run: .*the kernel refused .*Invalid argument"):
            check()


@pytest.mark.usefixtures("has_landlock")
def test_a_run_folder_that_programs_may_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    (packages / "runs").mkdir(parents=True)
    check_sandbox([packages / "runs"])
    monkeypatch.syspath_prepend(packages)
    with pytest.raises(PreflightError, match=r"site-packages, which contains .*runs; choose another folder"):
        check_sandbox([packages / "runs"])
