"""The combinations of a sweep, their names, and the mistakes before anything starts."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.launcher import sweep
from areal_rloo.launcher.sweep import combinations, main, split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-5,1e-4", ["1e-5", "1e-4"]),
        ("[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("{rank: 8, alpha: 16},null", ["{rank: 8, alpha: 16}", "null"]),
        ("alone", ["alone"]),
        ("it's,so", ["it's", "so"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(text: str, expected: list[str]) -> None:
    assert split(text) == expected


def test_every_combination_is_a_run_with_a_name_of_its_own() -> None:
    runs = combinations(["learner.optimizer.learning_rate=1e-5,1e-4", "model.path=org/a,org/b"])
    assert [run.options for run in runs] == [
        ("learner.optimizer.learning_rate=1e-5", "model.path=org/a"),
        ("learner.optimizer.learning_rate=1e-5", "model.path=org/b"),
        ("learner.optimizer.learning_rate=1e-4", "model.path=org/a"),
        ("learner.optimizer.learning_rate=1e-4", "model.path=org/b"),
    ]
    assert runs[1].name == "2-learning_rate=1e-5+path=org-b"
    assert len({run.name for run in combinations([f"run.seed={','.join(map(str, range(200)))}"])}) == 200


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--over", "run.seed="], "without an empty value"),
        (["--over", "run.seed=1,,2"], "without an empty value"),
        (["--over", "run.seed=1,1"], "expected each value once"),
        (["--over", "run.seed=1,2", "--over", "run.seed=3"], "expected each key once"),
        (["--over", "run.seed=1,2", "run.seed=3"], "expected each key once"),
        (["--over", "run.seed=1,x"], "override 'run.seed=x': run.seed: expected int"),
        (["--over", "run.name=a,b"], "the sweep names its runs; set --folder"),
        (["--over", "learner={groups_per_step: 4}", "learner={groups_per_step: 8}"], "expected each key once"),
        (["--over", "run.sead=1"], "unknown key 'run.sead'"),
        (["--over", "run.seed=1", "run.folder=x"], "the sweep names its runs; set --folder"),
        (["--over", "run.seed=1", "--parallel", "0"], "argument '--parallel': expected at least 1, got 0"),
        (["--over", "run.seed=1", "--launcher", "k8s"], "argument '--launcher': expected one of local, slurm, ray"),
        (["--over", "run.seed=1", "word"], "argument 'word': expected key.path=value"),
        (["--over", f"run.seed={','.join(map(str, range(1001)))}"], "expected at most 1000 combinations"),
        ([], "the following arguments are required: --over"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(arguments: list[str], expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with pytest.raises(ConfigError) as error:
        main(["--config", "quickstart.yaml", "--folder", str(folder), *arguments])
    assert expected in str(error.value)
    assert not folder.exists()


def test_the_options_of_a_sweep_stay_beside_a_preset_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, Config] = {}

    def start(run: Any, begin: Sequence[str], folder: Path, **_: object) -> Any:
        begun[run.name] = load_config(begin[-1], run.options)
        return SimpleNamespace(exit_code=lambda: 0)

    monkeypatch.setattr(sweep, "_started", start)
    over = ["--over", "algorithm.preset=rloo,grpo", "algorithm.loss.eps_high=0.35", "--folder", str(tmp_path / "s")]
    assert main(["--config", "quickstart.yaml", *over]) == 0
    assert [config.algorithm.loss.eps_high for config in begun.values()] == [0.35, 0.35]
    assert main(["--config", "quickstart.yaml", *over, "learner.num_train_steps=7"]) == 0
    assert main(["--config", "quickstart.yaml", *over]) == 0
    monkeypatch.setattr(sweep, "is_finished", lambda _: True)
    with pytest.raises(ConfigError, match=r"1-preset=rloo has finished with other options: run\.seed 0 -> 7; give"):
        main(["--config", "quickstart.yaml", *over, "run.seed=7"])
    assert main(["--config", "quickstart.yaml", *over]) == 0


def test_a_dry_run_lists_the_runs_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    over = ["--over", "run.seed=1,2", "--folder", str(folder), "--dry-run"]
    assert main(["--config", "quickstart.yaml", *over]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder / '1-seed=1'}: run.seed=1",
        f"{folder / '2-seed=2'}: run.seed=2",
    ]
    assert not folder.exists()
