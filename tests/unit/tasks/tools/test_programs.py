"""Programs whose sandbox fails: tried again, then dropped with a reason, and given up after many failures."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import eventually
from support.processes import processes_with

from areal_rloo.errors import EpisodeError, PreflightError, StartError
from areal_rloo.files import ScratchFolder, remove_abandoned
from areal_rloo.tasks.tools import sandbox, sandbox_child
from areal_rloo.tasks.tools.programs import Programs, Retries
from areal_rloo.tasks.tools.sandbox import SandboxLimits, check_sandbox, run_python

QUICK = Retries(pauses_s=(0.01, 0.01), most_failures=3, give_up_after_s=0.0)
LIMITS = SandboxLimits(wall_s=60.0)
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
REFUSE = (
    f"import sys; sys.stderr.write('the kernel refused: Cannot allocate memory'); sys.exit({sandbox_child.NOT_LOCKED})"
)


@pytest.fixture(autouse=True)
def _can_lock() -> None:
    try:
        check_sandbox()
    except PreflightError as error:
        pytest.skip(str(error))


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the child's program: the first starts behave as told, later starts as always."""

    def fails(first: str, num: int) -> None:
        starts = tmp_path / "starts"
        starts.touch()
        path = tmp_path / "child.py"
        path.write_text(
            f"import os, runpy\nwith open({str(starts)!r}, 'a') as file: file.write('x')\n"
            f"if os.path.getsize({str(starts)!r}) <= {num}:\n    {first}\n"
            f"runpy.run_path({sandbox_child.__file__!r}, run_name='__main__')\n"
        )
        command = sandbox._command
        monkeypatch.setattr(
            sandbox,
            "_command",
            lambda *arguments: [str(path) if word == sandbox_child.__file__ else word for word in command(*arguments)],
        )

    return fails


def test_a_child_killed_before_its_lock_is_tried_again(child: Any) -> None:
    child(KILL, 2)
    assert asyncio.run(Programs(LIMITS, QUICK).run("print(7)")) == "7"


def test_a_folder_that_a_full_disk_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make, refusals = tempfile.mkdtemp, [OSError(errno.ENOSPC, "No space left on device")]

    def mkdtemp(*arguments: Any, **keywords: Any) -> str:
        if refusals:
            raise refusals.pop()
        return make(*arguments, **keywords)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    assert asyncio.run(Programs(LIMITS, QUICK).run("print(7)")) == "7"
    assert not refusals


def test_without_descriptors_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (os.open(os.devnull, os.O_RDONLY), limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ScratchFolder(tmp_path, "sandbox")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    program = "open('big', 'wb').write(bytes(1000)); import time; time.sleep(600)"
    code = (
        "import asyncio\nfrom areal_rloo.tasks.tools.sandbox import SandboxLimits, run_python\n"
        f"asyncio.run(run_python({program!r}, SandboxLimits(wall_s=600)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    eventually(lambda: any(tmp_path.glob("*/scratch/big")), "the program did not begin")
    process.kill()
    process.wait()
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_child_that_is_always_killed_first_drops_samples(child: Any) -> None:
    child(KILL, 1000)

    async def scenario() -> None:
        programs = Programs(LIMITS, QUICK)
        for _ in range(2):
            with pytest.raises(EpisodeError, match=r"tool_failed: .* ended with code -9"):
                await programs.run("print(7)")
        with pytest.raises(StartError, match="3 programs in a row were not run"):
            await programs.run("print(7)")

    asyncio.run(scenario())


def test_a_refused_lock_is_the_user_s_mistake_only_at_first(child: Any) -> None:
    async def scenario() -> None:
        programs = Programs(LIMITS, QUICK)
        assert await programs.run("print(7)") == "7"
        child(REFUSE, 1000)
        with pytest.raises(EpisodeError, match=r"tool_failed: .*Cannot allocate memory"):
            await programs.run("print(7)")
        with pytest.raises(PreflightError, match="Cannot allocate memory"):
            await Programs(LIMITS, QUICK).run("print(7)")

    asyncio.run(scenario())


def test_a_child_that_is_not_locked_in_time_is_no_mistake_of_the_program(child: Any) -> None:
    child("import time; time.sleep(3600)", 1)
    with pytest.raises(EpisodeError, match="tool_failed"):
        asyncio.run(run_python("print(7)", SandboxLimits(wall_s=2.0)))


def test_a_process_that_cannot_start_drops_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EpisodeError, match=r"tool_failed: .*cannot start a process: .*No such file"):
        asyncio.run(Programs(LIMITS, QUICK).run("print(7)"))


def test_a_program_that_cannot_be_ended_drops_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example in an uninterruptible system call."""
    monkeypatch.setattr(sandbox, "_END_S", 0.2)
    kill = sandbox._Run.kill
    monkeypatch.setattr(sandbox._Run, "kill", lambda run: None)

    async def scenario() -> None:
        with pytest.raises(EpisodeError, match="tool_timeout"):
            await run_python("import time; time.sleep(3600)", SandboxLimits(wall_s=2.0))
        monkeypatch.setattr(sandbox._Run, "kill", kill)
        (process,) = processes_with([sandbox_child.__file__], psutil.Process().children())
        process.kill()
        await asyncio.sleep(0.2)  # the loop reaps the process

    asyncio.run(scenario())
