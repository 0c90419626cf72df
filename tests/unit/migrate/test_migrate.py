"""The examples of AReaL, verl, TRL and ms-swift for RLOO go through `migrate`: every setting is accounted for."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.migration import EXAMPLES, found

from areal_rloo.__main__ import main
from areal_rloo.config import Config, load_config
from areal_rloo.config.load import config_of
from areal_rloo.errors import DataError
from areal_rloo.migrate.__main__ import as_yaml, report
from areal_rloo.migrate.reading import read
from areal_rloo.migrate.translate import RULES, Translation, translate
from areal_rloo.migrate.trl_steps import PROCESSES


def migrated(name: str, folder: Path, **settings: object) -> tuple[Translation, Config]:
    translation = translate(found(name, folder, EXAMPLES[name], **settings))
    assert translation.refusal == ""
    path = folder / "migrated.yaml"
    path.write_text(as_yaml(translation))
    config = load_config(str(path))
    assert config == config_of(translation.tree)
    return translation, config


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_setting_of_an_example_is_accounted_for(name: str, tmp_path: Path) -> None:
    given = found(name, tmp_path, EXAMPLES[name])
    translation, _ = migrated(name, tmp_path)
    assert {line.name for line in translation.lines} >= set(given.settings)
    assert [line.name for line in translation.lines if line.fate == "unknown"] == []
    assert [line.name for line in translation.lines if line.fate in ("none", "hand") and not line.why] == []


def test_an_example_of_areal_becomes_our_config_of_it(tmp_path: Path) -> None:
    _, config = migrated("areal.yaml", tmp_path)
    ours = load_config("gsm8k_rloo_areal.yaml")
    assert config.algorithm == ours.algorithm
    steps = {"num_train_steps": ours.learner.num_train_steps}
    assert msgspec.structs.replace(config.learner, **steps) == ours.learner
    assert (config.data.num_epochs, config.learner.num_train_steps) == (10, 0)
    assert config.rollout.sampling == ours.rollout.sampling
    assert (config.rollout.engine, config.rollout.num_workers, config.rollout.num_slots) == ("sglang", 4, 256)
    assert (config.model, config.data.train, config.data.eval) == (ours.model, ours.data.train, ours.data.eval)


def test_an_example_of_verl_becomes_our_config_of_it(tmp_path: Path) -> None:
    translation, config = migrated("verl.sh", tmp_path)
    ours = load_config("gsm8k_rloo_verl.yaml")
    assert config.algorithm == ours.algorithm
    assert msgspec.structs.replace(config.learner, num_train_steps=210) == ours.learner
    assert config.rollout == msgspec.structs.replace(ours.rollout, engine="vllm", num_slots=64)
    assert (config.model, config.data) == (ours.model, msgspec.structs.replace(ours.data, num_epochs=15))
    assert (config.evaluation, config.checkpoint) == (ours.evaluation, ours.checkpoint)
    assert "qwen3_8b" in [line.value for line in translation.lines]


def test_the_small_example_of_verl_shares_one_gpu(tmp_path: Path) -> None:
    translation, config = migrated("verl_small.sh", tmp_path)
    assert (config.rollout.share_devices, config.learner.offload) == ("in_turns", "parameters")
    assert config.learner.lora is not None
    assert (config.learner.lora.rank, config.learner.lora.alpha) == (32, 32)
    assert config.algorithm.kl.coefficient == 0  # verl has no KL unless a switch says so
    assert (config.data.overlong_prompts, config.checkpoint.every_n_steps) == ("truncate_left", 0)
    assert "ppo_micro_batch_size_per_gpu" in "".join(line.name for line in translation.lines if line.fate == "hand")


def test_a_script_of_trl_counts_the_batch_of_all_processes(tmp_path: Path) -> None:
    _, config = migrated("trl.py", tmp_path, **{PROCESSES: 4})
    assert config.learner.groups_per_step * config.algorithm.group_size == 8 * 4 * 8
    assert (config.algorithm.group_size, config.learner.num_minibatches) == (2, 4)
    assert (config.algorithm.preset, config.algorithm.kl.coefficient) == ("rloo_trl", 0.05)
    assert (config.learner.optimizer.learning_rate, config.learner.optimizer.schedule) == (1e-5, "linear")
    assert config.data.train_sources[0].task == "math"
    assert config.data.train_sources[0].hub == "AI-MO/NuminaMath-TIR"
    assert config.data.eval is not None


@pytest.mark.parametrize(
    "command", ["torchrun --nproc_per_node gpu rloo.py", "accelerate launch --num_processes 4 8 rloo.py"]
)
def test_a_number_of_processes_that_is_none_is_a_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rloo.sh"
    path.write_text(f"{command} --model_name_or_path org/name --num_generations 8 --trainer RLOOTrainer")
    assert main(["migrate", str(path)]) == 2
    assert "with --processes N" in capsys.readouterr().err
    assert main(["migrate", str(path), "--processes", "8"]) == 0


def test_a_command_of_ms_swift_has_the_settings_of_our_config(tmp_path: Path) -> None:
    translation, config = migrated("swift.sh", tmp_path)
    ours = load_config("gsm8k_rloo_ms_swift.yaml")
    assert config.algorithm == ours.algorithm
    assert msgspec.structs.replace(config.learner, num_train_steps=1868) == ours.learner
    by_hand = {line.name for line in translation.lines if line.fate == "hand"}
    assert by_hand == {"external_plugins", "reward_funcs", "system"}


def test_all_unknown_settings_are_listed_at_once(tmp_path: Path) -> None:
    text = "--num_generations 8 --fancy 1 --fancier true --beta x --per_device_train_batch_size 8 # trl rloo"
    translation = translate(found("run.sh", tmp_path, f"swift rlhf {text}"))
    assert [line.name for line in translation.lines if line.fate == "unknown"] == ["fancy", "fancier"]
    assert "beta" in {key.rpartition(".")[2] or key for line in translation.lines for key in (line.name,)}
    assert "algorithm.kl.coefficient" in translation.refusal
    assert any("the config is not complete" in line for line in report("trl", translation))


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [
        ("algorithm.adv_estimator=gae", "hand", "expected one of rloo"),
        ("actor_rollout_ref.actor.ppo_epochs=many", "hand", "expected a number"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=100", "hand", "expected a divisor"),
        ("data.truncation=cut", "hand", "expected one of error, left, right, middle"),
        ("trainer.n_gpus_per_node=half", "hand", "expected a number"),
        ("reward_model.enable=True", "hand", "data.train.rewards"),
    ],
)
def test_a_value_without_a_counterpart_is_for_the_user(value: str, key: str, expected: str, tmp_path: Path) -> None:
    name = value.partition("=")[0]
    text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=x data.train_batch_size=256 {value}"
    (line,) = [line for line in translate(found("run.sh", tmp_path, text)).lines if line.name == name]
    assert line.fate == key
    assert expected in line.why


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "- 1", "expected settings of AReaL"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.py", "def", "cannot be read"),
        ("a.sh", "echo 'a", "cannot be read"),
        ("a.sh", "", "expected settings of AReaL"),
        ("a.sh", "\udcff", "cannot be read"),
        ("a.yaml", "x: " + "y" * 2**20, "expected a config or a script"),
    ],
)
def test_a_file_without_settings_is_refused(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=expected):
        read(tmp_path / name)


def test_no_code_of_a_script_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    texts = {
        "a.py": f"open({str(mark)!r}, 'w'); RLOOConfig(beta=open({str(mark)!r}, 'w'), num_generations=2)",
        "a.sh": f"swift rlhf --num_generations $(touch {mark}) --beta `touch {mark}`",
        "a.yaml": f"gconfig: !!python/object/apply:os.system ['touch {mark}']",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        main(["migrate", str(tmp_path / name)])
    assert not mark.exists()


def test_the_command_prints_a_config_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "areal.yaml").write_text(EXAMPLES["areal.yaml"])
    assert main(["migrate", str(tmp_path / "areal.yaml")]) == 0
    output = capsys.readouterr()
    tree: Any = yaml.safe_load(output.out)
    assert tree["algorithm"]["group_size"] == 4
    assert output.out.startswith("# From areal.yaml of areal")
    assert "translated:" in output.err
    assert "actor.optimizer.warmup_steps_proportion=0.001" in output.err
    assert main(["migrate", str(tmp_path / "areal.yaml"), "--processes", "0"]) == 2


def test_the_config_itself_names_what_is_left_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config goes to a file, and outlives the report on the terminal."""
    script = EXAMPLES["swift.sh"].rstrip() + " --nonsense 'two\nlines' --per_device_eval_batch_size 4"
    (tmp_path / "swift.sh").write_text(script)
    assert main(["migrate", str(tmp_path / "swift.sh")]) == 0
    printed = capsys.readouterr().out
    comments = [line for line in printed.splitlines() if line.startswith("#")]
    assert [line for line in comments if line.startswith("# to do by hand: system=prompt.txt; a file; copy")]
    assert [line for line in comments if line.startswith("# unknown to this command: nonsense=")]
    assert not [line for line in comments if "per_device_eval_batch_size" in line]
    assert config_of(yaml.safe_load(printed))


@pytest.mark.parametrize("system", RULES)
def test_a_rule_names_only_options_that_exist(system: str) -> None:
    """Every rule with a fixed list of options, tried with all of its values."""
    from areal_rloo.config.options import groups

    known = {option.key for group in groups() for option in group.options} | {group.key for group in groups()}
    for pattern, rule in RULES[system].items():  # type: ignore[index]
        options: dict[str, Any] = {}
        for value in (1, True, False, "rloo", "token", "linear"):
            try:
                options |= {} if rule.make is None else rule.make(value, {})
            except Exception:  # noqa: BLE001 - a value that this rule does not take
                continue
        assert set(options) - {"actor"} <= known, pattern
