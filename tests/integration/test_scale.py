"""The number of rollout workers of a running run is changed."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.local_runs import REPO, Run, assert_drained, balanced
from support.patience import eventually
from support.processes import command_of

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import PreflightError
from areal_rloo.files import lock_file, write_atomically
from areal_rloo.launcher.fleet import Answer
from areal_rloo.launcher.scale import main as scale_main
from areal_rloo.telemetry.wanted import read_wanted

pytestmark = pytest.mark.slow


USAGE = "areal-rloo scale [-h] --workers N RUN_FOLDER"


def _scale(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_rloo.launcher.scale", str(folder), *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


def _workers(run: Run) -> set[str]:
    words = [word for process in run.children("areal_rloo.rollout") for word in command_of(process)]
    return {word.removeprefix("--worker-id=") for word in words if word.startswith("--worker-id=")}


def _targets(run: Run) -> set[str]:
    return {path.name.split(".")[-2] for path in (run.folder.parent / "targets").iterdir()}


def test_a_running_run_gets_more_workers_then_fewer(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=10000")
    run.wait_for(lambda: len(run.records()) >= 1)
    assert _scale(run.folder, "--workers=3").stdout == f"the run in {run.folder} gets 3 rollout workers\n"
    run.wait_for(lambda: run.records()[-1].num_workers == 3)
    (run.folder / "scale-answer.json").write_bytes(b"{")  # a cut answer is none
    write_atomically(run.folder / "scale.json", b'{"num_workers": "\xff"}')  # else the launcher may read half of it
    since = len(run.records())
    run.wait_for(lambda: len(run.records()) > since + 5)
    assert _targets(run) == {"learner", "rollout-0", "rollout-1", "rollout-2"}
    (frozen,) = [one for one in run.children("areal_rloo.rollout") if "--worker-id=rollout-1" in command_of(one)]
    frozen.suspend()
    assert _scale(run.folder, "--workers=1").returncode == 0
    frozen.kill()  # so it cannot end well
    run.wait_for(lambda: run.records()[-1].num_workers == 1)
    eventually(lambda: _targets(run) == {"learner", "rollout-0"}, "Prometheus forgets the workers that left")
    assert _scale(run.folder, "--workers=2").returncode == 0
    run.wait_for(lambda: run.records()[-1].num_workers == 2)
    assert _workers(run) == {"rollout-0", "rollout-1"}
    assert read_wanted(run.folder, 0).num_workers == 2
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    assert f"; go on from step-{run.records()[-1].num_train_steps:06d}: " in output
    assert f"-m areal_rloo resume {run.folder}\n" in output
    assert "rollout workers: 1 before, 3 from now on" in output
    assert "rollout workers: 3 before, 1 from now on" in output
    assert output.count("scale.json is ignored") == 1
    assert "restart" not in (run.folder / "logs" / "launcher.log").read_text(), "a worker that left stays away"
    assert "rollout-2 says goodbye" in (run.folder / "logs" / "learner.log").read_text()
    assert_drained(run)
    ledger = run.summary()["ledger"]
    assert balanced(ledger)
    assert ledger["dropped"].keys() <= {"stale"}, "a slow machine; the prompts come again"
    ended = _scale(run.folder, "--workers=2")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "no launcher runs here; start it: areal-rloo resume " in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers=0"], "num_workers: expected 1 to 1024, got 0"),
        (["--workers=1025"], "num_workers: expected 1 to 1024, got 1025"),
        (["--workers=2"], "no launcher runs here"),
        (
            ["--workers=many"],
            f"argument --workers: invalid int value: 'many'; expected {USAGE}",
        ),
        (
            [],
            f"the following arguments are required: --workers; expected {USAGE}",
        ),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: ended}\n")
    ended = _scale(tmp_path, *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("error: ")
    assert words in ended.stderr


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    ended = _scale(tmp_path, "--workers=2")
    assert (ended.returncode, ended.stderr) == (
        2,
        f"error: {tmp_path}: no run here (config.yaml is missing); expected a run folder such as runs/latest\n",
    )


def test_a_wish_that_a_starting_launcher_removed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("quickstart.yaml")))
    lock = lock_file(tmp_path / ".launcher-lock")
    assert lock is not None
    asking = threading.Thread(target=scale_main, args=([str(tmp_path), "--workers=2"],))
    asking.start()
    wish = tmp_path / "scale.json"
    eventually(wish.exists, "no wish")
    wish.unlink()
    eventually(wish.exists, "the wish is lost")
    answer = Answer(msgspec.json.decode(wish.read_bytes())["wish_id"])
    (tmp_path / "scale-answer.json").write_bytes(msgspec.json.encode(answer))
    asking.join(60)
    assert not asking.is_alive()
    lock.release()


def test_a_wish_ends_with_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("quickstart.yaml")))
    lock = lock_file(tmp_path / ".launcher-lock")
    assert lock is not None
    threading.Timer(1.0, lock.release).start()
    with pytest.raises(PreflightError, match="the launcher has not answered yet"):
        scale_main([str(tmp_path), "--workers=2"])
