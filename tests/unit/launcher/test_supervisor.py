"""A supervisor with real processes: restarts, and no process left behind."""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support.patience import eventually
from support.process_specs import make_spec

from areal_rloo.errors import EXIT_WENT_BACK, TrainingError
from areal_rloo.launcher.long_logs import MOST_BYTES
from areal_rloo.launcher.plan import Plan, ProcessSpec
from areal_rloo.launcher.processes import LocalProcess, LocalStarter
from areal_rloo.launcher.ranks import LearnerRanks
from areal_rloo.launcher.supervisor import RESTART_WINDOW_S, Supervisor, named
from areal_rloo.telemetry.logs import get_logger, run_to_exit_code, setup_logs
from areal_rloo.telemetry.progress import Progress, RunConsole

# Ends with a code so many times, then stays; each start writes a line.
ENDS = """
import sys, time
from pathlib import Path
file, code, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with file.open("a") as opened:
    opened.write("start\\n")
if len(file.read_text().splitlines()) <= times:
    sys.exit(code)
time.sleep(1000)
"""
# Leaves a child in its session.
LEAVES = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid, flush=True)
"""


class Refusing(LocalStarter):
    """Refuses starts while `refuses`, as a host without memory does."""

    def __init__(self) -> None:
        super().__init__(drain_timeout_s=1.0)
        self.refuses = False
        self.num_refused = 0

    def start(self, spec: ProcessSpec, log: Path) -> LocalProcess:
        if self.refuses:
            self.num_refused += 1
            raise OSError(12, "Cannot allocate memory")
        return super().start(spec, log)


@pytest.fixture
def starter() -> Refusing:
    return Refusing()


@pytest.fixture
def make_supervisor(starter: Refusing, tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    made: list[Supervisor] = []

    def make(*, goodbye_s: float = 0.0, **options: Any) -> Supervisor:
        made.append(Supervisor(starter, tmp_path / "logs", goodbye_s=goodbye_s, **options))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop_all(1.0)


@pytest.fixture
def supervisor(make_supervisor: Callable[..., Supervisor]) -> Supervisor:
    return make_supervisor()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines of the supervisor's log."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Handler(), get_logger("areal_rloo.launcher.supervisor")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield lines
    logger.removeHandler(handler)


def _ends(folder: Path, code: int, times: int, *, max_restarts: int) -> ProcessSpec:
    return make_spec(
        sys.executable, "-c", ENDS, str(folder / "starts"), str(code), str(times), max_restarts=max_restarts
    )


def _tend_until_start(num: int, supervisor: Supervisor, folder: Path) -> None:
    def is_started() -> bool:
        supervisor.tend("one")
        return _num_starts(folder) == num

    eventually(is_started, f"start {num} did not come")


def _num_starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_failed_process_is_restarted_max_restarts_times(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(_ends(tmp_path, 1, 10, max_restarts=1))
    eventually(lambda: not supervisor.tend("one"), "it was not given up")
    assert (_num_starts(tmp_path), supervisor.exit_code("one")) == (2, 1)
    assert not supervisor.tend("one"), "and not once more later"
    assert supervisor.restarts() == {"one": 1}


def test_each_end_is_told_with_its_last_words_and_its_logs(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path
) -> None:
    said: list[str] = []
    supervisor = make_supervisor(say=said.append)
    program = "import sys; print('MemoryError: no memory'); sys.exit(1)"
    supervisor.start(make_spec(sys.executable, "-c", program, max_restarts=1))
    eventually(lambda: not supervisor.tend("one"), "it was not given up")
    more = f"({tmp_path / 'logs' / 'one'}.out and .log say more). MemoryError: no memory"
    assert said == [
        f"one ended with code 1; restart in 0.0 s {more}",
        f"one ended with code 1; no restart is left (launcher.max_restarts) {more}",
    ]


def test_a_restart_that_fails_is_repeated_and_said_once(
    supervisor: Supervisor, starter: Refusing, tmp_path: Path, logged: list[str]
) -> None:
    supervisor.start(_ends(tmp_path, 1, 1, max_restarts=1))
    starter.refuses = True
    eventually(lambda: supervisor.tend("one") and starter.num_refused == 3, "no further attempt")
    starter.refuses = False
    _tend_until_start(2, supervisor, tmp_path)
    assert sum("cannot be restarted: [Errno 12] Cannot allocate memory" in line for line in logged) == 1


def test_ranks_that_cannot_be_restarted_are_restarted_later(
    supervisor: Supervisor, starter: Refusing, tmp_path: Path
) -> None:
    specs = tuple(msgspec.structs.replace(_ends(tmp_path, 1, 2, max_restarts=0), name=name) for name in ("a", "b"))
    plan = Plan(preparation=None, learner=specs, workers=(), max_learner_restarts=1)
    ranks = LearnerRanks(plan, supervisor, tmp_path, Progress(RunConsole(quiet=True), num_train_steps=1))
    ranks.start()
    eventually(lambda: ranks.exit_code() == 1, "it did not end")
    starter.refuses = True
    eventually(lambda: ranks.restart(1) and starter.num_refused == 2, "no further attempt")
    starter.refuses = False
    eventually(lambda: ranks.exit_code() is None or not ranks.restart(1), "no restart")
    assert ranks.exit_code() is None
    assert not ranks.has_restart_left


def test_code_2_is_the_users_mistake_at_the_first_start_alone(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(_ends(tmp_path, 2, 2, max_restarts=2))
    eventually(lambda: supervisor.is_refused("one"), "it did not end")
    _tend_until_start(2, supervisor, tmp_path)
    eventually(lambda: supervisor.exit_code("one") == 2, "it did not end again")
    assert not supervisor.is_refused("one")
    _tend_until_start(3, supervisor, tmp_path)


def test_restarts_of_the_day_before_do_not_count(make_supervisor: Callable[..., Supervisor], tmp_path: Path) -> None:
    days = 0.0
    supervisor = make_supervisor(clock=lambda: time.monotonic() + days * RESTART_WINDOW_S)
    supervisor.start(_ends(tmp_path, 1, 4, max_restarts=1))
    for num_starts in (2, 3, 4):
        _tend_until_start(num_starts, supervisor, tmp_path)
        eventually(lambda: supervisor.exit_code("one") is not None, "it did not end")
        assert not supervisor.tend("one"), "twice in a day"
        days += 1
    _tend_until_start(5, supervisor, tmp_path)


def test_the_backends_restarts_count_for_a_day(
    make_supervisor: Callable[..., Supervisor], starter: Refusing, tmp_path: Path
) -> None:
    """Ray gives a process up after `max_restarts`."""
    starter.restarts = True
    days = 0.0
    supervisor = make_supervisor(clock=lambda: time.monotonic() + days * RESTART_WINDOW_S)
    supervisor.start(_ends(tmp_path, 1, 1, max_restarts=1))
    eventually(lambda: not supervisor.tend("one"), "it was not given up")
    days = 1.1
    _tend_until_start(2, supervisor, tmp_path)


def test_nothing_is_said_of_a_worker_that_said_goodbye(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path, logged: list[str]
) -> None:
    supervisor = make_supervisor(goodbye_s=1e9)
    supervisor.start(_ends(tmp_path, 0, 1, max_restarts=1))
    eventually(lambda: supervisor.exit_code("one") is not None, "it did not end")
    assert supervisor.tend("one")
    assert not any("ended" in line for line in logged)


def test_a_worker_that_said_goodbye_is_given_up_later(
    make_supervisor: Callable[..., Supervisor], tmp_path: Path
) -> None:
    """At the end of a run, the learner ends soon after its workers."""
    passed_s = 0.0
    said: list[str] = []
    supervisor = make_supervisor(goodbye_s=50.0, clock=lambda: passed_s, say=said.append)
    supervisor.start(_ends(tmp_path, 0, 1, max_restarts=0))
    eventually(lambda: supervisor.exit_code("one") is not None, "it did not end")
    assert supervisor.tend("one")
    passed_s = 49.0
    assert supervisor.tend("one")
    assert said == []
    passed_s = 51.0
    assert not supervisor.tend("one")
    assert not supervisor.tend("one")
    assert [line.partition(" (")[0] for line in said] == ["one ended with code 0; no restart is left"], "once"


def test_last_words_of_an_unreadable_output_are_empty(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "logs" / "one.out").mkdir(parents=True)
    assert supervisor.last_words("one") == supervisor.last_words("two") == ""


def test_last_words_lost_to_a_full_disk_name_the_disk(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "one.out").touch()
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert supervisor.last_words("one") == (
        f"Its output is missing: {tmp_path / 'logs'} has 0 bytes free; free some disk"
    )


def test_last_words_lost_to_a_full_disk_come_from_the_log(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_logs("one", level="info", file=tmp_path / "logs" / "one.log")

    def fail() -> int:
        raise TrainingError("too many skipped steps")

    try:
        assert run_to_exit_code(fail) == 1
    finally:
        setup_logs("one", level="info", file=None)
    (tmp_path / "logs" / "one.out").touch()
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert supervisor.last_words("one").startswith("error: too many skipped steps. Its output is missing: ")


def test_a_worker_with_a_diverged_history_is_always_restarted(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(_ends(tmp_path, EXIT_WENT_BACK, 3, max_restarts=0))
    _tend_until_start(4, supervisor, tmp_path)
    assert supervisor.exit_code("one") is None


def test_the_rest_of_a_session_is_killed_after_the_process(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(make_spec(sys.executable, "-c", LEAVES))
    eventually(lambda: supervisor.exit_code("one") is not None, "it did not end")
    left = int((tmp_path / "logs" / "one.out").read_text())

    def is_gone() -> bool:
        return not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE

    eventually(is_gone, "what it left is still there")
    assert is_gone()


def test_a_reaped_process_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may belong to another process by then."""
    with (tmp_path / "out").open("wb") as output:
        process = LocalProcess([sys.executable, "-c", ""], os.environ, output)
    eventually(lambda: process.exit_code() is not None, "it did not end")

    def refuse(*arguments: int) -> None:
        raise AssertionError(f"a signal to {arguments}")

    monkeypatch.setattr("os.killpg", refuse)
    monkeypatch.setattr("os.kill", refuse)
    process.kill()
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0


def test_the_session_is_killed_before_the_number_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the process is reaped, the system gives the number to no other process."""
    killed: list[str] = []
    killpg = os.killpg

    def look_and_kill(group: int, number: int) -> None:
        killed.append(psutil.Process(group).status())
        killpg(group, number)

    with (tmp_path / "out").open("wb") as output:
        process = LocalProcess([sys.executable, "-c", ""], os.environ, output)
    monkeypatch.setattr("os.killpg", look_and_kill)
    eventually(lambda: process.exit_code() is not None, "it did not end")
    assert killed == [psutil.STATUS_ZOMBIE]


def test_an_exit_code_names_its_signal_or_reason() -> None:
    assert [named(code) for code in (0, 1, 4, 137, 143, 300, None)] == [
        *("0", "1", "4 (the learner restarted from an older version)", "137 (SIGKILL)", "143 (SIGTERM)", "300", "None")
    ]


@pytest.mark.parametrize("name", ["tracker-wandb.out", "rollout-0.sglang.log", "rollout-0.log"])
def test_the_output_of_trackers_and_servers_is_bounded_too(name: str, supervisor: Supervisor, tmp_path: Path) -> None:
    log = tmp_path / "logs" / name
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    supervisor.shorten_logs()
    assert log.stat().st_size < MOST_BYTES / 2
