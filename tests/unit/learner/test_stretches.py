"""The configs of a run's stretches: noted from the right step on, compared, and refused before anything is written."""

import hashlib
import json
from pathlib import Path

import pytest
from support.folders import listing

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.errors import CheckpointError
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.launcher.run_folder import choose_folder, resume_changes
from areal_rloo.launcher.start import begin
from areal_rloo.learner.stretches import begin_stretch, breaks_of, read_starts, read_stretches

PLACEMENT = Placement((Host("here", "127.0.0.1", 2, (), 0),), (), ())


def config_with(*overrides: str) -> Config:
    return load_config("quickstart.yaml", list(overrides))


def _make_checkpoint(folder: Path, version: int, config: str) -> Path:
    checkpoint = folder / "checkpoints" / f"step-{version:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(config)
    digest = hashlib.sha256(config.encode()).hexdigest()
    (checkpoint / "checksums.json").write_text(json.dumps({"config.yaml": digest}))
    return checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a checkpoint of version 40."""
    _make_checkpoint(tmp_path, 40, dump_config(config_with()))
    (tmp_path / "config.yaml").write_text(dump_config(config_with()))
    begin_stretch(tmp_path, config_with(), 0)
    return tmp_path


def test_each_stretch_keeps_its_config_from_its_first_step_on(tmp_path: Path) -> None:
    first, second = config_with(), config_with("learner.groups_per_step=16", "launcher.max_restarts=3")
    begin_stretch(tmp_path, first, 0)
    begin_stretch(tmp_path, first, 20)  # a resume without a change
    begin_stretch(tmp_path, second, 40)
    with (tmp_path / "configs" / "starts.jsonl").open("ab") as file:
        file.write(b'{"version": 50, "ti')  # a killed learner
    assert [start.version for start in read_starts(tmp_path)] == [0, 20, 40]
    one, other = read_stretches(tmp_path)
    assert (one.version, one.config, one.changes) == (0, dump_config(first), [])
    assert (other.version, other.config) == (40, dump_config(second))
    assert [change.key for change in other.changes] == ["learner.groups_per_step", "launcher.max_restarts"]


def test_evaluations_are_compared_since_the_change_of_their_set(tmp_path: Path) -> None:
    first, other = config_with(), config_with("data.eval.num_prompts=8")
    begin_stretch(tmp_path, first, 0)
    begin_stretch(tmp_path, config_with("learner.groups_per_step=16"), 10)
    assert breaks_of(tmp_path).evaluations == {}
    assert breaks_of(tmp_path).evaluations_after("arithmetic") == -1
    assert breaks_of(tmp_path, resumed=(20, other)).evaluations == {"arithmetic": [20]}
    begin_stretch(tmp_path, other, 20)
    begin_stretch(tmp_path, config_with("data.eval=null"), 30)
    assert breaks_of(tmp_path).evaluations == {"arithmetic": [20]}
    longer = config_with("data.eval.num_prompts=8", "evaluation.max_new_tokens=7")
    breaks = breaks_of(tmp_path, resumed=(40, longer))
    assert (breaks.evaluations, breaks.evaluations_after("arithmetic")) == ({"arithmetic": [20, 40]}, 40)
    assert breaks_of(tmp_path, resumed=(20, first)).evaluations == {}, "steps after 20 are lost"


@pytest.mark.parametrize(
    ("change", "breaks"),
    [
        ("algorithm.rewards.scale=0.5", [20]),
        ("rollout.sampling.max_new_tokens=9", [20]),
        ("algorithm.min_reward_std=0.1", [20]),
        ("learner.optimizer.learning_rate=0.001", []),
        ("data.eval.num_prompts=8", []),
    ],
)
def test_rewards_are_compared_since_a_change_that_moves_them(change: str, breaks: list[int], tmp_path: Path) -> None:
    begin_stretch(tmp_path, config_with(), 0)
    begin_stretch(tmp_path, config_with(change), 20)
    begin_stretch(tmp_path, config_with(change, "launcher.max_restarts=3"), 40)
    assert breaks_of(tmp_path).rewards == breaks


def test_a_stretch_without_a_kept_step_is_forgotten(tmp_path: Path) -> None:
    begin_stretch(tmp_path, config_with(), 0)
    begin_stretch(tmp_path, config_with("learner.groups_per_step=16"), 40)
    begin_stretch(tmp_path, config_with("learner.groups_per_step=8"), 30)  # from an older checkpoint
    assert [stretch.version for stretch in read_stretches(tmp_path)] == [0, 30]
    begin_stretch(tmp_path, config_with(), 30)
    assert [stretch.version for stretch in read_stretches(tmp_path)] == [0]
    begin_stretch(tmp_path, config_with("run.seed=3"), 0)  # no checkpoint was there yet
    (only,) = read_stretches(tmp_path)
    assert "seed: 3" in only.config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "run.seed=1",
            r"run\.seed: expected 0 as in step-000040, got 1: another seed gives another order",
        ),
        ("learner.lora={rank: 4}", r"learner\.lora: expected null as in step-000040, got \{\"rank\": 4"),
        ("data.train={task: math}", r"data\.train\.task: expected arithmetic as in step-000040, got math"),
        ("learner.num_train_steps=39", r"learner\.num_train_steps: expected at least 40, .* got 39; raise it"),
    ],
)
def test_a_refused_change_is_one_line_and_writes_nothing(folder: Path, override: str, words: str) -> None:
    config, before = config_with(f"run.folder={folder}", override), listing(folder)
    for attempt in (
        lambda: choose_folder(config, resume=True),
        lambda: begin(config, PLACEMENT, folder, ports=(1, 2), resume=True),
    ):
        with pytest.raises(CheckpointError, match=words) as raised:
            attempt()
        assert "\n" not in str(raised.value)
    assert listing(folder) == before


def test_the_newest_run_goes_on_only_under_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / "latest").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert choose_folder(config_with(), resume=True) == folder
    with pytest.raises(CheckpointError, match=r"the newest run, .*, has run\.name=quickstart, and the config"):
        choose_folder(config_with("run.name=other"), resume=True)


def test_allowed_changes_are_said_in_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with("learner.optimizer.learning_rate=5e-5", "learner.num_train_steps=200")
    request = begin(config, PLACEMENT, folder, ports=(1, 2), resume=True)
    assert request.resume
    said = capsys.readouterr().err.splitlines()
    before = config_with()
    assert said == [
        f"resume: learner.num_train_steps {before.learner.num_train_steps} -> 200 from step 40 on; "
        "a linear or cosine schedule ends at this step",
        f"resume: learner.optimizer.learning_rate {before.learner.optimizer.learning_rate:g} -> 5e-05 from step 40 on; "
        "the moments go on",
    ]


def test_a_checkpoint_whose_config_is_of_another_version_is_refused(folder: Path) -> None:
    _make_checkpoint(folder, 41, "algorithm: {unknown: 1}")
    with pytest.raises(CheckpointError, match=r"unknown key 'algorithm\.unknown'.*resume with the version"):
        resume_changes(folder, config_with())


@pytest.mark.parametrize("damaged", ["config.yaml", "checksums.json"])
def test_a_damaged_config_is_passed_over_as_the_learner_does(folder: Path, damaged: str) -> None:
    checkpoint = _make_checkpoint(folder, 41, dump_config(config_with("run.seed=3")))
    (checkpoint / damaged).write_bytes((checkpoint / damaged).read_bytes()[:-9])
    (line,) = resume_changes(folder, config_with("learner.groups_per_step=9"))
    assert " -> 9 from step 40 on; " in line


def test_a_run_without_a_checkpoint_may_begin_with_any_options(tmp_path: Path) -> None:
    assert resume_changes(tmp_path, config_with("run.seed=5")) == []
