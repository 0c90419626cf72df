"""Runs that resume with other options: they complete within the new bound, or refuse and write nothing."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folders import listing
from support.local_runs import REPO, Run, balanced

from areal_rloo.learner.batches import folder_of as batches_of
from areal_rloo.learner.batches import list_batches, read_batch
from areal_rloo.learner.stretches import read_stretches

Options = dict[str, int]
_KEYS = {
    "groups_per_step": "learner.groups_per_step",
    "group_size": "algorithm.group_size",
    "max_staleness": "algorithm.max_staleness",
}
FIRST: Options = {"groups_per_step": 4, "group_size": 4, "max_staleness": 2}
SECOND: Options = {"groups_per_step": 8, "group_size": 2, "max_staleness": 3}
THIRD: Options = {"groups_per_step": 2, "group_size": 6, "max_staleness": 0}


def _overrides(options: Options) -> list[str]:
    return [f"{_KEYS[name]}={value}" for name, value in options.items()]


def _drained(run: Run, num_steps: int) -> int:
    """Drain a run after some steps, while groups are under way; return the version of the checkpoint."""
    run.wait_for(lambda: len(run.records()) >= num_steps)
    run.process.terminate()
    code, output = run.wait()
    assert code == 0, output
    return run.saved_steps()


@pytest.mark.rare
def test_a_run_completes_with_other_groups_and_staleness_up_and_down(start: Callable[..., Run]) -> None:
    common = ("learner.num_train_steps=9", "wire.record=true", "data.eval=null")
    first = _drained(start(*_overrides(FIRST), *common), 2)
    second = _drained(start(*_overrides(SECOND), *common, "--resume"), 5)
    run = start(*_overrides(THIRD), *common, "--resume")
    code, output = run.wait()
    assert code == 0, output
    log = (run.folder / "logs" / "launcher.log").read_text()
    for before, now, version in ((FIRST, SECOND, first), (SECOND, THIRD, second)):
        for name, key in _KEYS.items():
            assert f"resume: {key} {before[name]} -> {now[name]} from step {version} on; " in log
    assert f"resume: algorithm.max_staleness 3 -> 0 from step {second} on; " in output

    summary = run.summary()
    assert (summary["exit_reason"], summary["num_train_steps"]) == ("completed", 9)
    assert balanced(summary["ledger"])
    assert summary["ledger"]["buffered"] == summary["ledger"]["in_flight"] == 0
    assert [record.num_train_steps for record in run.records()] == list(range(1, 10))
    for record in run.records():
        began = [version < record.num_train_steps for version in (0, first, second)]
        options = (FIRST, SECOND, THIRD)[sum(began) - 1]
        assert record.trained_tokens > 0
        assert record.staleness_max <= options["max_staleness"]
        (*_, path) = list_batches(batches_of(run.folder))[record.num_train_steps]
        assert len(read_batch(path)) == options["groups_per_step"]
    assert [stretch.version for stretch in read_stretches(run.folder)] == [0, first, second]
    starts = [json.loads(line) for line in (run.folder / "environment.jsonl").read_text().splitlines()]
    assert [("--resume" in start["command"], start["packages"]["areal-rloo"] is not None) for start in starts] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert "Options changed on a resume" in (run.folder / "report.html").read_text()

    replayed = subprocess.run(
        [sys.executable, "-m", "areal_rloo.replay", str(run.folder)], capture_output=True, text=True, check=False
    )
    assert replayed.returncode == 2
    (line,) = replayed.stderr.splitlines()
    assert line.startswith(f"error: the run was resumed at version {first} with other values of algorithm.group_size")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=7", "error: run.seed: expected 0 as in step-000001, got 7: another seed gives another order of"),
        ("model.tiny.num_layers=3", "error: model.tiny.num_layers: expected 2 as in step-000001, got 3: "),
        ("telemetry.metrics_host=203.0.113.7", "error: telemetry.metrics_host: 203.0.113.7 is no address of this host"),
        ("learner.num_threads=4096", "error: learner.num_threads: expected at most"),
        ("learner.lora={rank: 2}", "error: learner.lora: expected null as in step-000001, got "),
    ],
)
def test_a_refused_change_leaves_the_folder_untouched(finished: Run, override: str, words: str) -> None:
    before = listing(finished.folder)
    again = Run(finished.folder, "learner.num_train_steps=1", override, "--resume")
    code, output = again.wait()
    assert (code, len(output.splitlines())) == (2, 1), output
    assert output.startswith(words)
    assert listing(finished.folder) == before


@pytest.mark.parametrize("more", [(), pytest.param(("--dry-run",), marks=pytest.mark.rare)])
def test_a_resume_with_other_prompts_leaves_the_folder_untouched(
    start: Callable[..., Run], tmp_path: Path, more: tuple[str, ...]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+1=?", "answer": f"#### {n + 1}"}) + "\n" for n in range(9)))
    options = ("data.train.task=gsm8k", f"data.train.path={rows}", "data.eval=null", "data.max_prompt_tokens=200")
    run = start(*options, "learner.num_train_steps=1")
    code, output = run.wait()
    assert code == 0, output
    rows.write_text(rows.read_text().replace("8+1", "8+2", 1))
    before = listing(run.folder)
    code, output = Run(run.folder, *options, "learner.num_train_steps=2", "--resume", *more).wait()
    assert (code, len(output.splitlines())) == (2, 1), output
    assert output.startswith("error: data.train: the checkpoint was made with gsm8k (9 items, ")
    assert listing(run.folder) == before


def test_a_dry_run_of_a_resume_says_what_changes_and_writes_nothing(finished: Run) -> None:
    before = listing(finished.folder)
    again = Run(finished.folder, "learner.num_train_steps=2", "algorithm.preset=dr_grpo", "--resume", "--dry-run")
    code, output = again.wait()
    assert code == 0, output
    assert "resume: learner.num_train_steps 1 -> 2 from step 1 on; " in output
    assert "resume: algorithm.adv_norm.mean_leave1out true -> false from step 1 on; " in output
    assert listing(finished.folder) == before


def test_a_resume_whose_learner_never_begins_keeps_summary_and_report(finished: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    before = _told(folder)
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom areal_rloo.telemetry import scrapes\n"
        "def refuse(*arguments):\n    raise OSError('no such address')\n"
        "if 'areal_rloo.learner' in sys.orig_argv:\n    scrapes._Server.__init__ = refuse\n"
    )
    resumed = ("learner.num_train_steps=2", "data.eval=null", "learner.optimizer.learning_rate=1e-3", "--resume")
    code, output = Run(folder, *resumed, entry=tmp_path / "mine.py").wait()
    assert (code, "no such address" in output) == (1, True), output
    assert _told(folder) == before
    run = Run(folder, *resumed)
    assert run.summary()["exit_reason"] == "completed"
    code, output = run.wait()
    assert code == 0, output
    assert run.summary()["num_train_steps"] == 2
    assert [stretch.version for stretch in read_stretches(folder)] == [0, 1]


def _told(folder: Path) -> dict[str, bytes]:
    """Read the files that tell what the run has done."""
    told = (folder / "summary.json", folder / "report.html", folder / "metrics.jsonl", *folder.glob("configs/*"))
    return {path.name: path.read_bytes() for path in told}


def test_damaged_checkpoints_are_not_offered_for_a_resume(finished: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "damaged")
    (folder / "checkpoints" / "step-000001" / "state.msgpack").unlink()
    code, output = Run(folder, "learner.num_train_steps=2", "data.eval=null", "--resume").wait()
    assert code == 2, output
    assert "every checkpoint is damaged; start again with another run.folder (step-000001 is damaged: " in output
    assert f"logs: {folder / 'logs'}\n" in output, "the error has the remedy"


def test_a_resume_without_a_checkpoint_begins_again_with_any_options(finished: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    changed = ("learner.num_train_steps=1", "data.eval=null", "run.seed=4", "model.tiny.hidden_size=60")
    code, output = Run(folder, *changed, "--resume").wait()
    assert code == 0, output
    assert "resume: " not in output
    (stretch,) = read_stretches(folder)
    assert "hidden_size: 60" in stretch.config
    made = folder / "checkpoints" / "step-000001" / "model" / "config.json"
    assert json.loads(made.read_text())["hidden_size"] == 60


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cache = {"AREAL_RLOO_CACHE": str(REPO / ".pytest_cache" / "models")}
    folder = tmp_path_factory.mktemp("finished") / "run"
    run = Run(folder, "learner.num_train_steps=1", "data.eval=null", environment=cache)
    code, output = run.wait()
    assert code == 0, output
    return run
