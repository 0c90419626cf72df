"""When the launcher restarts the learner, and the causes it names, with real processes in place of the ranks."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support.patience import eventually
from support.process_specs import make_spec

from areal_rloo.errors import EXIT_UNSAVED
from areal_rloo.launcher.plan import Plan, ProcessSpec
from areal_rloo.launcher.processes import LocalStarter
from areal_rloo.launcher.ranks import LearnerRanks
from areal_rloo.launcher.supervisor import Supervisor
from areal_rloo.telemetry.progress import Progress
from areal_rloo.telemetry.records import TrainRecord

# A rank counts its starts; then it runs the program of the test.
RANK = """
import os, sys, time
from pathlib import Path
rank, run = sys.argv[1], Path(sys.argv[2])
folder = run / "checkpoints"
with (run / f"starts-{rank}").open("a") as file:
    file.write("start\\n")
start = len((run / f"starts-{rank}").read_text().splitlines())
def make(name):
    (folder / name).mkdir(parents=True, exist_ok=True)
"""
DIES_SAVING = "make('.unfinished-step-000001'); os.kill(os.getpid(), 9)"


class _Run:
    """The ranks of a learner in a folder, and everything that the launcher said."""

    def __init__(self, folder: Path, max_restarts: int, programs: tuple[str, ...]) -> None:
        self._folder = folder
        self._said = io.StringIO()
        self.supervisor = Supervisor(LocalStarter(drain_timeout_s=1.0), folder / "logs", goodbye_s=1.0)
        plan = Plan(
            preparation=None,
            learner=tuple(_spec(rank, folder, program) for rank, program in enumerate(programs)),
            workers=(),
            max_learner_restarts=max_restarts,
        )
        self.progress = Progress(Console(file=self._said, width=10_000), num_train_steps=50)
        self.ranks = LearnerRanks(plan, self.supervisor, folder, self.progress)
        self.ranks.start()

    @property
    def num_starts(self) -> int:
        file = self._folder / "starts-0"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def end(self) -> tuple[int, str]:
        """Restart as the launcher does; give the last exit code and all messages."""
        while True:
            eventually(lambda: self.ranks.exit_code() is not None, "the learner did not end")
            code = self.ranks.exit_code()
            assert code is not None
            if not self.ranks.restart(code):
                return code, self._said.getvalue() + self.ranks.last_words(code)


def _spec(rank: int, folder: Path, program: str) -> ProcessSpec:
    command = (sys.executable, "-c", RANK + program, str(rank), str(folder))
    return make_spec(*command, name=f"learner-{rank}" if rank else "learner", role="learner")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., _Run]]:
    runs: list[_Run] = []

    def begin(*programs: str, max_restarts: int = 5) -> _Run:
        runs.append(_Run(tmp_path, max_restarts, programs))
        return runs[-1]

    yield begin
    for run in runs:
        run.supervisor.stop_all(1.0)


def test_a_learner_killed_twice_while_saving_ends_the_run_with_the_cause(begin: Callable[..., _Run]) -> None:
    run = begin(DIES_SAVING)
    code, said = run.end()
    assert (code, run.num_starts) == (137, 2)
    assert said.count("The learner was killed while it wrote step-000001: probably the kernel needed memory") == 2
    assert "the learner restarts from the beginning" in said
    assert "Give the learner's host more memory" in said


def test_a_checkpoint_between_two_kills_gives_all_restarts_again(begin: Callable[..., _Run]) -> None:
    run = begin(f"if start <= 3: make(f'step-{{start:06d}}')\n{DIES_SAVING}")
    code, _ = run.end()
    assert (code, run.num_starts) == (137, 4), "the fourth start left no checkpoint between two kills"
    assert [*run.supervisor.restarts().values()] == [3], "the metric counts all of them"


def test_an_unfinished_checkpoint_explains_a_single_end(begin: Callable[..., _Run], tmp_path: Path) -> None:
    run = begin(f"if start == 1: {DIES_SAVING}\nos.kill(os.getpid(), 9)", max_restarts=1)
    _, said = run.end()
    assert said.count("killed while it wrote") == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_restart_forgets_the_steps_after_its_checkpoint(
    begin: Callable[..., _Run], tmp_path: Path, make_train_record: Callable[..., TrainRecord]
) -> None:
    (tmp_path / "checkpoints" / "step-000040").mkdir(parents=True)
    run = begin("sys.exit(1)", max_restarts=2)
    run.progress.show([make_train_record(num_train_steps=40, policy_version=40)])
    eventually(lambda: run.ranks.exit_code() is not None, "the learner did not end")
    assert run.ranks.restart(1)
    assert run.progress.line().startswith("step 40/50")
    run.progress.show([make_train_record(num_train_steps=41, policy_version=41)])
    run.end()
    with pytest.raises(AssertionError, match="no train step yet"):
        run.progress.line()


def test_a_learner_that_could_not_save_its_end_is_not_restarted(begin: Callable[..., _Run]) -> None:
    run = begin(f"print('error: version 8 could not be saved'); sys.exit({EXIT_UNSAVED})")
    code, said = run.end()
    assert (code, run.num_starts) == (1, 1)
    assert said == "the learner ended with code 1. error: version 8 could not be saved"


def test_progress_after_a_damaged_checkpoint_gives_all_restarts_again(
    begin: Callable[..., _Run], tmp_path: Path
) -> None:
    for name in ("step-000040", "step-000050"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    run = begin(
        "if start == 2:\n"
        "    (folder / 'step-000050').rename(folder / 'set-aside-step-000050')\n"
        "    make('step-000042')\n"
        "sys.exit(1)",
        max_restarts=1,
    )
    code, said = run.end()
    assert (code, run.num_starts) == (1, 3)
    assert "restarts from step-000050 (restart 1 of 1)" in said
    assert "restarts from step-000042 (restart 1 of 1)" in said


def test_a_kill_by_the_launcher_is_not_explained_by_memory(begin: Callable[..., _Run]) -> None:
    run = begin("make('.unfinished-step-000001'); time.sleep(1000)")
    eventually(lambda: run.num_starts == 1, "it did not start")
    run.ranks.kill()
    assert "memory" not in run.ranks.last_words(137)


@pytest.mark.parametrize(("end", "is_explained"), [("sys.exit(1)", False), ("os.kill(os.getpid(), 9)", True)])
def test_only_a_kill_of_another_rank_is_explained_by_memory(
    begin: Callable[..., _Run], monkeypatch: pytest.MonkeyPatch, end: str, is_explained: bool
) -> None:
    """The launcher kills rank 0 in both cases."""
    monkeypatch.setattr("areal_rloo.launcher.supervisor._GRACE_S", 0.1)
    run = begin("time.sleep(1000)", f"make('.unfinished-step-000001'); {end}", max_restarts=0)
    code, said = run.end()
    assert code == 137
    assert ("killed while it wrote step-000001" in said) == is_explained
