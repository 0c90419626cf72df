"""Settings in a YAML file beside a command of TRL or ms-swift: `trl rloo --config FILE`, `swift rlhf FILE`."""

from pathlib import Path

import pytest
from support.migration import by_hand, found

from areal_rloo.migrate.translate import translate

TRAINS = "--model_name_or_path org/m --dataset_name openai/gsm8k --per_device_train_batch_size 8 --num_generations 8"


def test_a_file_beside_the_command_counts_less_than_the_command(tmp_path: Path) -> None:
    (tmp_path / "rloo.yaml").write_text("env: {A: b}\nbeta: 0.02\nlearning_rate: 3.0e-6\nbf16: true\n")
    script = f"trl rloo --config rloo.yaml --learning_rate 5e-6 {TRAINS}"
    settings = found("run.sh", tmp_path, script).settings
    assert (settings["beta"], settings["learning_rate"], settings["bf16"]) == (0.02, 5e-6, True)
    assert "config" not in settings
    assert not [one.name for one in translate(found("run.sh", tmp_path, script)).lines if one.fate == "unknown"]
    (tmp_path / "rloo.yaml").unlink()
    translation = translate(found("run.sh", tmp_path, script))
    assert "config=rloo.yaml: a file with more settings" in translation.refusal


@pytest.mark.parametrize("command", ["trl rloo", "accelerate launch rloo.py"])
def test_a_command_may_leave_all_settings_to_the_file(command: str, tmp_path: Path) -> None:
    (tmp_path / "rloo.yaml").write_text("model_name_or_path: org/m\nnum_generations: 4\n")
    given = found("run.sh", tmp_path, f"{command} \\\n  --config rloo.yaml")
    assert (given.system, given.settings) == ("trl", {"model_name_or_path": "org/m", "num_generations": 4})


@pytest.mark.parametrize(
    "command", ["swift rlhf swift.yaml --beta 0.1", "NPROC_PER_NODE=4 swift rlhf swift.yaml --beta 0.1"]
)
def test_the_file_after_swift_rlhf_counts_less_than_the_options(command: str, tmp_path: Path) -> None:
    script = f"# swift rlhf old.yaml\n{command}"
    (tmp_path / "swift.yaml").write_text("rlhf_type: grpo\nmodel: org/m\nlearning_rate: 2.0e-5\nbeta: 0.5\n")
    given = found("run.sh", tmp_path, script)
    assert given.system == "ms-swift"
    assert given.settings == {"rlhf_type": "grpo", "model": "org/m", "learning_rate": 2e-5, "beta": 0.1}
    (tmp_path / "swift.yaml").unlink()
    assert "config=swift.yaml: a file with more" in translate(found("run.sh", tmp_path, script)).refusal


def test_a_command_whose_file_is_missing_is_of_trl(tmp_path: Path) -> None:
    translation = translate(found("run.sh", tmp_path, "trl rloo --config rloo.yaml"))
    assert "config=rloo.yaml: a file with more settings" in translation.refusal


def test_a_file_without_settings_adds_none(tmp_path: Path) -> None:
    (tmp_path / "rloo.yaml").write_text("# nothing yet\n")
    assert "config" not in found("run.sh", tmp_path, f"trl rloo --config rloo.yaml {TRAINS}").settings


def test_settings_of_a_file_that_a_branch_chooses_are_doubtful(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("learning_rate: 1.0e-4\nbeta: 0.5\n")
    (tmp_path / "small.yaml").write_text("learning_rate: 1.0e-6\nseed: 3\n")
    choice = "C=large.yaml\nif test $X; then C=small.yaml; fi\n"
    given = found("run.sh", tmp_path, f"{choice}trl rloo --config $C {TRAINS} --seed 4")
    assert by_hand(given).keys() == {"config", "learning_rate"}
    assert translate(given).tree["run"]["seed"] == 4


def test_an_option_that_a_branch_switches_off_is_doubtful(tmp_path: Path) -> None:
    script = f'if test $X; then E="--no_gradient_checkpointing"; fi\ntrl rloo {TRAINS} $E'
    assert "gradient_checkpointing" in by_hand(found("run.sh", tmp_path, script))


def test_a_file_of_settings_that_names_itself_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rloo.yaml"
    path.write_text("config: rloo.yaml\nnum_generations: 4\n")
    assert found("rloo.yaml", tmp_path, path.read_text()).settings["config"] == "rloo.yaml"
    assert found("run.sh", tmp_path, f"trl rloo --config rloo.yaml {TRAINS}").settings["config"] == "rloo.yaml"


@pytest.mark.parametrize("option", ["--no_gradient_checkpointing", "--no-gradient-checkpointing"])
def test_an_option_that_begins_with_no_is_a_setting_that_is_off(option: str, tmp_path: Path) -> None:
    translation = translate(found("run.sh", tmp_path, f"trl rloo {TRAINS} {option}"))
    assert translation.tree["learner"]["gradient_checkpointing"] is False
    assert not [line.name for line in translation.lines if line.fate == "unknown"]
