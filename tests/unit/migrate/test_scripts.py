"""Scripts are read as their interpreter reads them: the words of bash itself, and the branches of Python."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.migration import by_hand, found

from areal_rloo.__main__ import main
from areal_rloo.migrate.translate import translate

TRAINS = "--model_name_or_path org/m --dataset_name openai/gsm8k --per_device_train_batch_size 8 --num_generations 8"

# A command `trl` that prints its words takes the place of the real one.
WORDS = {
    "variable": 'COMMON="--beta 0.02 --temperature 0.8"\ntrl grpo $COMMON --seed 1',
    "quoted": 'P="answer in one line"\ntrl grpo --system "$P" --seed 1',
    "braces": 'COMMON="--beta 0.02"\nCOMMON+=" --seed 1"\ntrl grpo ${COMMON} --top_p 0.5',
    "array": """
M=org/m
ARGS=(
  --model_name_or_path $M   # the model
  --run_name 'two words'

  --learning_rate 3e-6
)
ARGS+=(--num_generations 4)
EMPTY=()
trl grpo "${ARGS[@]}" "${EMPTY[@]}" --seed 1
""",
    "in an array": 'A="1 2"\nB=($A "$A")\ntrl grpo --x "${B[@]}"',
    "of an array": "A=(--seed 1)\nB=(--x 2 ${A[@]})\ntrl grpo ${B[*]}",
    "declared": 'declare -a ARGS=(\n  --seed 5\n  --beta 0.02\n)\ntrl grpo "${ARGS[@]}"',
    "syntax in quotes": "trl grpo --stop_words '<|im_end|>' --system '<think> & 1) (2' --seed 5",
    "syntax in an array": 'ARGS=(\n  --system "1) :( think"\n  --seed 5\n)\ntrl grpo "${ARGS[@]}"',
    "a comment that ends with a backslash": "SEED=4\n# SEED=3 \\\nSEED=5;# SEED=6\ntrl grpo --seed $SEED",
    "no text": 'trl grpo --hub_token "" --seed 5',
    "texts that YAML reads": "trl grpo --system 'after #### it: x' --run_name 2024-05-01 --hub_token 12:30:00",
    "joined": 'A="--beta 0.1"\nB=" --seed 5"\ntrl grpo $A$B',
    "redirected": "trl grpo 2>/dev/null --seed 5 2>&1",
    "backslashes": 'P="\\\\"\n# a comment\' here\ntrl grpo --seed 5 --run_name a\\ b',
    "a text": "cat <<EOF > /dev/null\nSEED=4\nEOF\ntrl grpo --seed ${SEED:-5} --beta 0.1",
    "a default": ': "${SEED:=5}"\ntrl grpo --seed $SEED',
    "for one command": "SEED=5\nSEED=4 true\nunset BETA\ntrl grpo --seed $SEED --beta ${BETA:-0.3}",
    "single quotes": "SEED=4\ntrl grpo --system 'costs $SEED'",
    "negative": "trl grpo --max_steps -1 --top_k -1 --epsilon -.5",
    "prefix": "NNODES=2 NPROC_PER_NODE=8 trl grpo --seed 1",
}


def words_of_bash(script: str, folder: Path) -> list[str]:
    program = folder / "trl"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    (folder / "words.sh").write_text(script)
    shown = subprocess.run(
        ["bash", "words.sh"], cwd=folder, env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, check=True
    )
    return shown.stdout.decode().split("\0")[1:-1]  # without `grpo`


@pytest.mark.parametrize("name", WORDS)
def test_a_command_has_the_words_that_bash_gives_it(name: str, tmp_path: Path) -> None:
    given = found("run.sh", tmp_path, f"{WORDS[name]} {TRAINS}").settings
    words = words_of_bash(f"{WORDS[name].rstrip()} {TRAINS}", tmp_path)
    expected: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            option = expected[word.removeprefix("--")] = []  # the last counts
        else:
            option.append(word)
    as_texts = {
        key: [str(one) for one in (value if isinstance(value, list) else [value])] for key, value in given.items()
    }
    assert as_texts.keys() == expected.keys()
    numbers = {"learning_rate": ["3e-06"], "epsilon": ["-0.5"]}
    assert as_texts == {key: numbers.get(key, value) for key, value in expected.items()}


@pytest.mark.parametrize(
    ("script", "others", "absent"),
    [
        (f"trl sft --learning_rate 2e-5 --weight_decay 0.1\ntrl grpo {TRAINS}", ["trl sft"], {"weight_decay"}),
        (f"trl grpo {TRAINS}\npython evaluate.py --seed 7 --dtype float16", ["python evaluate.py"], {"seed", "dtype"}),
        (f"trl vllm-serve --seed 7 &\naccelerate launch grpo.py {TRAINS}", ["trl vllm-serve"], {"seed"}),
        (f"trl sft --seed 7 && trl grpo {TRAINS}", ["trl sft"], {"seed"}),
        (f"python train.py {TRAINS} --trainer RLOOTrainer\npython chat.py --seed 7", ["python chat.py"], {"seed"}),
    ],
)
def test_settings_of_other_commands_are_left_out_and_said(
    script: str, others: list[str], absent: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = found("run.sh", tmp_path, script)
    assert list(given.others) == others
    assert absent.isdisjoint(given.settings)
    assert main(["migrate", str(tmp_path / "run.sh")]) == 0
    assert f"left out, because another command trains: {others[0]}" in capsys.readouterr().err


def test_what_two_trainings_do_not_agree_on_is_for_the_user(tmp_path: Path) -> None:
    script = f"trl grpo {TRAINS} --seed 1\ntrl grpo {TRAINS} --seed 2 --temperature 0.5"
    given = found("run.sh", tmp_path, script)
    assert given.doubtful == {"seed", "temperature"}
    assert "or has several" in by_hand(given)["seed"]


def test_an_element_added_in_a_branch_is_doubtful_and_the_others_are_not(tmp_path: Path) -> None:
    script = f'A=(--seed 1)\nif [ "$X" ]; then A+=(--temperature 0.5); fi\ntrl grpo "${{A[@]}}" {TRAINS}'
    assert found("run.sh", tmp_path, script).doubtful == {"temperature"}


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("[[ $X ]] && A=(--seed 5)", "seed"),
        ("case $X in\n  a) A+=(--seed 5) ;;\nesac", "seed"),
        ("nvidia-smi && N=8", "max_steps"),
        ("N=4\nfor N in 1 2; do :; done", "max_steps"),
        ("(( X > 4 )) && N=8", "max_steps"),
    ],
)
def test_a_value_that_a_condition_decides_is_doubtful(lines: str, name: str, tmp_path: Path) -> None:
    script = f'{lines}\ntrl grpo {TRAINS} "${{A[@]}}" --max_steps $((${{N:-1}} * 10))'
    given = found("run.sh", tmp_path, script)
    assert name in given.doubtful & given.settings.keys()


def test_a_number_of_processes_that_a_branch_decides_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"if a; then export NPROC_PER_NODE=8; else export NPROC_PER_NODE=4; fi\ntrl grpo {TRAINS}")
    assert main(["migrate", str(path)]) == 2
    assert "NPROC_PER_NODE: depends on a branch; set the number of all processes" in capsys.readouterr().err
    assert main(["migrate", str(path), "--processes", "8"]) == 0


def test_words_that_only_the_shell_can_count_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found("run.sh", tmp_path, f'trl grpo {TRAINS} --seed 1 "${{EXTRA[@]}}" ${{X:+--beta}} 3')
    assert main(["migrate", str(tmp_path / "run.sh")]) == 0
    said = capsys.readouterr().err
    assert "not read, add its options by hand: ${EXTRA[@]}" in said
    assert "not read, add its options by hand: ${X:+--beta}" in said
    assert "seed=1 " in said


def test_an_option_of_hydra_can_be_removed(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=5"
    removed = "+data.seed=1 actor_rollout_ref.actor.clip_ratio_high=0.4 '~actor_rollout_ref.actor.clip_ratio_high'"
    given = found("run.sh", tmp_path, f"{script} {removed} ~data.seed=1").settings
    assert given == {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 5}


@pytest.mark.parametrize(
    ("script", "gpus", "hosts"),
    [
        (f"NNODES=2 NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo {TRAINS}", 8, 2),
        (f"torchrun --nnodes 2 --nproc_per_node 4 grpo.py {TRAINS}", 4, 2),
        (f"accelerate launch --num_machines 2 --num_processes 16 grpo.py {TRAINS}", 8, 2),
        (f"accelerate launch --num_processes 4 trl rloo {TRAINS}", 4, 1),
    ],
)
def test_the_batch_is_that_of_the_processes_of_all_hosts(script: str, gpus: int, hosts: int, tmp_path: Path) -> None:
    tree = translate(found("run.sh", tmp_path, script)).tree
    samples = tree["learner"]["groups_per_step"] * tree["algorithm"]["group_size"]
    assert samples == 8 * gpus * hosts
    assert (tree["launcher"]["gpus_per_host"], tree["launcher"].get("num_hosts", 1)) == (gpus, hosts)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("", "bfloat16"),
        ("--dtype float32", "bfloat16"),  # of the weights; the arithmetic is in bfloat16
        ("--dtype float32 --bf16 False", "float32"),
        ("--bf16 False --dtype bfloat16", "bfloat16"),
        ("--bf16", "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_the_arithmetic(options: str, dtype: str, tmp_path: Path) -> None:
    assert translate(found("run.sh", tmp_path, f"trl grpo {TRAINS} {options}")).tree["model"]["dtype"] == dtype


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--warmup_ratio 0.1", {"warmup_share": 0.1}),
        ("--warmup_steps 0.05", {"warmup_share": 0.05}),
        ("--warmup_ratio 0.1 --warmup_steps 20", {"warmup_steps": 20}),
        ("--warmup_steps 0 --warmup_ratio 0", {}),
    ],
)
def test_a_warmup_is_steps_or_a_share_of_them(options: str, expected: dict[str, Any], tmp_path: Path) -> None:
    optimizer = translate(found("run.sh", tmp_path, f"trl grpo {TRAINS} {options}")).tree["learner"]["optimizer"]
    assert {name: value for name, value in optimizer.items() if name.startswith("warmup")} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("optim.lr_warmup_steps_ratio=0.1", {"warmup_share": 0.1}),
        ("optim.lr_warmup_steps_ratio=0.1 {}.optim.lr_warmup_steps=-1", {"warmup_steps": 0, "warmup_share": 0.1}),
        ("optim.lr_warmup_steps_ratio=0.1 {}.optim.lr_warmup_steps=5", {"warmup_steps": 20}),  # of 4 minibatches
    ],
)
def test_steps_of_verl_come_before_its_share(options: str, expected: dict[str, Any], tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo {actor}.{options.format(actor)}"
    optimizer = translate(found("run.sh", tmp_path, text)).tree["learner"]["optimizer"]
    assert {name: value for name, value in optimizer.items() if name.startswith("warmup")} == expected


def test_a_variable_without_a_value_is_for_the_user(tmp_path: Path) -> None:
    given = found("run.sh", tmp_path, f"trl grpo {TRAINS} --seed $SEED --run_name run-$1")
    assert set(by_hand(given)) == {"seed", "run_name"}


PYTHON = """
from trl import GRPOConfig, GRPOTrainer
{before}
args = GRPOConfig(learning_rate=1e-6, num_generations=8, per_device_train_batch_size=8)
{after}
dataset = load_dataset("openai/gsm8k", "main")
GRPOTrainer(model="org/m", args=args, train_dataset=dataset, reward_funcs=f).train()
"""


@pytest.mark.parametrize(
    ("before", "after", "expected", "doubtful"),
    [
        ("", "args.learning_rate = 5e-6", {"learning_rate": 5e-6}, set()),
        ("", "args.temperature = 0.5\nother.beta = 2.0", {"temperature": 0.5}, set()),
        ("", "if debug:\n    args.learning_rate = 5e-6", {"learning_rate": 5e-6}, {"learning_rate"}),
        ("", "if __name__ == '__main__':\n    args.seed = 7", {"seed": 7}, set()),
        ("debug = GRPOConfig(learning_rate=1e-6, num_generations=8, per_device_train_batch_size=8, seed=3)", "",
         {"seed": 3}, {"seed"}),
        ("", "try:\n    args.seed = 7\nexcept ImportError:\n    pass", {"seed": 7}, {"seed"}),
        ("", "args.learning_rate *= 5", {"learning_rate": "args.learning_rate *= 5"}, set()),
        ("other = load_dataset('org/other')", "", {"dataset_name": "openai/gsm8k"}, set()),
        ("", "args.seed = int(sys.argv[1])", {"seed": "int(sys.argv[1])"}, set()),
    ],
)  # fmt: skip
def test_branches_and_later_assignments_of_python_count(
    before: str, after: str, expected: dict[str, Any], doubtful: set[str], tmp_path: Path
) -> None:
    given = found("train.py", tmp_path, PYTHON.format(before=before, after=after))
    assert {name: given.settings[name] for name in expected} == expected
    assert given.doubtful == doubtful
    assert doubtful <= by_hand(given).keys()
    assert "beta" not in given.settings


def test_a_name_of_a_literal_is_a_value(tmp_path: Path) -> None:
    constants = "MODEL = 'org/n'\nLR = 2e-6\nTWICE = 1\nTWICE = 2"
    script = (
        PYTHON.format(before=constants, after="args.seed = TWICE").replace("1e-6", "LR").replace("'org/m'", "MODEL")
    )
    settings = found("train.py", tmp_path, script.replace('"org/m"', "MODEL")).settings
    assert (settings["model"], settings["learning_rate"], settings["seed"]) == ("org/n", 2e-6, "TWICE")


def test_arithmetic_of_numbers_is_a_value(tmp_path: Path) -> None:
    sizes = "BATCH = 4\nSAMPLES = 512\n"
    batch = "per_device_train_batch_size=BATCH, gradient_accumulation_steps=BATCH * 2, max_steps=SAMPLES // 8 + 1"
    script = PYTHON.format(before=sizes, after="args.seed = 1 // 0").replace("per_device_train_batch_size=8", batch)
    given = found("train.py", tmp_path, script)
    assert (given.settings["gradient_accumulation_steps"], given.settings["max_steps"]) == (8, 65)
    assert given.settings["seed"] == "1 // 0"
    tree = translate(given).tree
    assert (tree["algorithm"]["group_size"], tree["learner"]["groups_per_step"]) == (8, 4)


def test_a_batch_with_an_unknown_part_is_for_the_user_as_a_whole(tmp_path: Path) -> None:
    batch = "per_device_train_batch_size=4, gradient_accumulation_steps=int(x)"
    script = PYTHON.format(before="", after="").replace("per_device_train_batch_size=8", batch)
    translation = translate(found("train.py", tmp_path, script))
    reasons = {line.name: line.why for line in translation.lines if line.fate == "hand"}
    assert reasons["per_device_train_batch_size"] == "gradient_accumulation_steps: expected a number"
    assert {"gradient_accumulation_steps", "num_generations"} <= reasons.keys()
    assert "per_device_train_batch_size=4: gradient_accumulation_steps" in translation.refusal


def test_the_command_names_the_trainer_whatever_the_comments_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = found("run.sh", tmp_path, f"# a baseline to compare with rloo\ntrl grpo {TRAINS}")
    assert translate(given).tree["algorithm"]["preset"] == "grpo"
    (tmp_path / "cfg.yaml").write_text("model_name_or_path: org/m\nrun_name: rloo-or-grpo\n")
    assert main(["migrate", str(tmp_path / "cfg.yaml")]) == 2
    assert "found both; a comment `# trl rloo`" in capsys.readouterr().err
    settings = "# trl rloo\nmodel_name_or_path: org/m\nrun_name: rloo-or-grpo\n"
    assert translate(found("cfg.yaml", tmp_path, settings)).tree["algorithm"]["preset"] == "rloo_trl"


def test_rows_that_a_script_changes_are_for_the_user(tmp_path: Path) -> None:
    script = PYTHON.format(before="", after="").replace('"main")', '"main").filter(f).map(g)')
    given = found("train.py", tmp_path, script)
    assert given.settings["dataset_changes"] == ["filter", "map"]
    assert "data.system_prompt" in by_hand(given)["dataset_changes"]


def test_a_shell_script_without_settings_names_the_script_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ("", "--num_generations 8 --learning_rate 1e-6"):
        (tmp_path / "run.sh").write_text(f"accelerate launch src/train.py {options}")
        assert main(["migrate", str(tmp_path / "run.sh")]) == 2
        assert "areal-rloo migrate src/train.py --processes N" in capsys.readouterr().err


def test_an_annotated_config_is_a_config(tmp_path: Path) -> None:
    script = PYTHON.format(before="", after="args.seed: int = 7").replace("args = ", "args: GRPOConfig = ")
    assert found("train.py", tmp_path, script).settings["seed"] == 7


def test_a_config_in_a_branch_is_doubtful(tmp_path: Path) -> None:
    script = PYTHON.format(before="", after="").replace("args = ", "if debug:\n    args = ")
    given = found("train.py", tmp_path, script)
    assert given.doubtful == {"learning_rate", "num_generations", "per_device_train_batch_size"}


def test_a_config_that_is_not_complete_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else it would run another task: our defaults have a model and data."""
    for rows, complete in (("load_dataset('openai/gsm8k', 'main')", True), ("args.rows", False)):
        script = f"RLOOTrainer('m', args=RLOOConfig(beta=0.1), train_dataset={rows})\n"
        (tmp_path / "train.py").write_text(script)
        assert main(["migrate", str(tmp_path / "train.py")]) == 0
        printed = capsys.readouterr().out
        assert ("\nTO_DO: make this config complete, then remove this line\n" not in printed) == complete
    (tmp_path / "mine.yaml").write_text(printed)
    assert main(["run", "--config", str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
    assert "unknown key 'TO_DO'" in capsys.readouterr().err
