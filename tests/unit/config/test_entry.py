"""A user's script as the entry of a run: on the command line, in the launcher and in child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
SCRIPT = """
import os
import pathlib
with (pathlib.Path(__file__).parent / "imported").open("a") as file:
    print(os.getpid(), file=file)
def reward(completion):
    return 1.0
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_rloo.launcher.local", *arguments, "--dry-run"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)},
    )


@pytest.mark.parametrize("first", [True, False], ids=["the script first", "--entry"])
def test_the_entry_is_imported_once_and_passed_to_every_process(tmp_path: Path, first: bool) -> None:
    (tmp_path / "my_rl.py").write_text(SCRIPT)
    rewards = "data.train.rewards=[{task: arithmetic}, {function: entry:reward}]"
    named = ["my_rl.py"] if first else ["--entry", "my_rl.py"]
    ended = run(*named, "--config", "quickstart.yaml", "--json", rewards, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len((tmp_path / "imported").read_text().splitlines()) == 1
    assert ended.stdout.count('"AREAL_RLOO_ENTRY":"my_rl.py"') == 3, "warm start, learner, rollout worker"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "run.entry: my_rl.py cannot be imported: FileNotFoundError: no such file"),
        ("1 / 0\n", "run.entry: my_rl.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_failing_import_of_the_entry_gives_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "my_rl.py").write_text(text)
    ended = run("my_rl.py", "--config", "quickstart.yaml", folder=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert words in ended.stderr


def test_a_name_missing_in_the_entry_is_reported(tmp_path: Path) -> None:
    (tmp_path / "my_rl.py").write_text("def reward(completion):\n    return 1.0\n")
    ended = run("my_rl.py", "--config", "quickstart.yaml", "rollout.episode.type=entry:Episode", folder=tmp_path)
    assert ended.returncode == 2
    assert "rollout.episode.type: entry has no class 'Episode'" in ended.stderr


def test_json_without_a_dry_run_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert ended.returncode == 2
    assert "argument '--json': expected with --dry-run" in ended.stderr
