"""A migrated value means the same as in its system: found by a comparison with the code of AReaL, verl and TRL."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.migration import found

from areal_rloo.__main__ import main
from areal_rloo.config.load import config_of
from areal_rloo.errors import DataError
from areal_rloo.migrate.reading import read
from areal_rloo.migrate.rules import source
from areal_rloo.migrate.translate import translate

SCRIPT = r"""
batch=${BATCH:-256}; empty=
mini=$((batch / 4))
len=$((1024 * 2))   # a comment with 'a quote
if [ "$DEVICE" = npu ]; then lr=2e-6; else lr=1e-6; fi
[ -n "$X" ] && n=16 || n=8
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B#1 \
    data.train_batch_size=$batch actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    data.max_response_length=$((len + 1024)) data.max_prompt_length=${empty:-512} \
    actor_rollout_ref.actor.optim.lr=$lr actor_rollout_ref.rollout.n=${n} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$(nproc) \
    "$@"   # the rest
echo --not_a_setting 1 trainer.save_freq=7
"""


def test_a_shell_script_is_read_as_the_shell_reads_it(tmp_path: Path) -> None:
    given = found("run.sh", tmp_path, SCRIPT)
    assert given.settings == {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B#1",
        "data.train_batch_size": 256,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "data.max_response_length": 3072,
        "data.max_prompt_length": 512,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "$(nproc)",
    }
    translation = translate(given)
    by_hand = {line.name.rpartition(".")[2]: line.why for line in translation.lines if line.fate == "hand"}
    assert set(by_hand) == {"lr", "n", "tensor_model_parallel_size"}
    assert "by a condition" in by_hand["lr"]
    assert "only the shell knows" in by_hand["tensor_model_parallel_size"]
    assert (translation.tree["learner"]["groups_per_step"], translation.tree["learner"]["num_minibatches"]) == (256, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trl grpo --model_name_or_path m --reward_funcs accuracy_reward", ("grpo", 8, 0.0, "token_mean", "gradient")),
        ("trl rloo --model_name_or_path m", ("rloo_trl", 2, 0.05, "seq_mean_token_mean", "weight")),
        ("swift rlhf --rlhf_type grpo --model m", ("grpo", 8, 0.04, "seq_mean_token_mean", "none")),
        (
            "swift rlhf --rlhf_type grpo --advantage_estimator rloo --model m",
            ("rloo_ms_swift", 8, 0.04, None, "weight"),
        ),
    ],
)
def test_a_command_says_which_algorithm_it_is(text: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    algorithm = config_of(translate(found("run.sh", tmp_path, text)).tree).algorithm
    preset, group_size, coefficient, aggregation, correction = expected
    assert (algorithm.preset, algorithm.group_size, algorithm.kl.coefficient) == (preset, group_size, coefficient)
    assert aggregation in (None, algorithm.loss.aggregation)
    assert algorithm.kl.correction == correction


def test_a_file_of_trl_without_an_algorithm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="RLOO or GRPO"):
        translate(found("run.sh", tmp_path, "accelerate launch train.py --num_generations 8 --model_name_or_path m"))


def test_optimizer_steps_of_trl_become_train_steps(tmp_path: Path) -> None:
    text = (
        "accelerate launch --num_processes 4 grpo.py --per_device_train_batch_size 8 --steps_per_generation 8 "
        "--gradient_accumulation_steps 2 --max_steps 1000 --save_steps 200 --eval_steps 100 --warmup_steps 40 "
        "--num_generations 8 --loss_type cispo --epsilon_high 5"
    )
    config = config_of(translate(found("run.sh", tmp_path, text)).tree)
    assert (config.learner.groups_per_step, config.learner.num_minibatches) == (32, 4)
    assert (config.learner.num_train_steps, config.data.num_epochs) == (250, None)
    assert (config.checkpoint.every_n_steps, config.evaluation.every_n_versions) == (50, 25)
    assert config.learner.optimizer.warmup_steps == 40  # of the optimizer, in both
    assert (config.algorithm.loss.kind, config.algorithm.loss.eps_high) == ("cispo", 4.0)
    twice = config_of(translate(found("run.sh", tmp_path, f"{text} --num_iterations 2")).tree)
    assert (twice.learner.num_epochs_per_batch, twice.learner.num_train_steps) == (2, 125)
    assert (twice.learner.optimizer.warmup_steps, twice.checkpoint.every_n_steps) == (40, 25)


def test_passes_of_verl_have_optimizer_steps_of_their_own(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    text = (
        f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=x {actor}.ppo_epochs=2 "
        f"actor_rollout_ref.rollout.n=4 data.train_batch_size=64 {actor}.ppo_mini_batch_size=32 "
        f"{actor}.optim.lr_warmup_steps=10"
    )
    learner = config_of(translate(found("run.sh", tmp_path, text)).tree).learner
    assert (learner.num_epochs_per_batch, learner.num_minibatches, learner.optimizer.warmup_steps) == (2, 2, 40)


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        ("algorithm.use_kl_in_reward=True", "kl", ("reward", "k1", 0.001)),
        ("actor_rollout_ref.actor.use_kl_loss=True", "kl", ("loss", "k3", 0.001)),
        ("algorithm.kl_ctrl.kl_coef=0.5", "kl", ("loss", "k3", 0.0)),
    ],
)
def test_the_kl_term_of_verl_is_where_verl_has_it(settings: str, key: str, expected: object, tmp_path: Path) -> None:
    text = f"verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 actor_rollout_ref.model.path=m {settings}"
    kl = config_of(translate(found("run.sh", tmp_path, text)).tree).algorithm.kl
    assert (kl.placement, kl.estimator, kl.coefficient) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai/gsm8k", {"task": "gsm8k"}),
        ("/home/me/data/gsm8k/train.parquet", {"task": "gsm8k"}),
        ("/home/me/data/math/train.parquet", {"task": "math"}),
        ("open-r1/OpenR1-Math-220k", {"task": "rows", "hub": "open-r1/OpenR1-Math-220k"}),
        ("/data/dapo-math-17k.parquet", {"task": "rows", "path": "/data/dapo-math-17k.parquet"}),
    ],
)
def test_only_a_known_set_becomes_a_task(name: str, expected: dict[str, str]) -> None:
    assert source(name) == expected


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_verl_and_ours_truncate_on_the_same_side(side: str, tmp_path: Path) -> None:
    text = f"verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.truncation={side}"
    assert translate(found("run.sh", tmp_path, text)).tree["data"]["overlong_prompts"] == f"truncate_{side}"


@pytest.mark.parametrize("name", ["gsm8k/train.parquet", "mine.parquet"])
def test_prepared_files_of_verl_stay_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    text = "verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 actor_rollout_ref.model.path=m"
    given = found("run.sh", tmp_path, f"{text} data.train_files={path} data.prompt_key=messages")
    train = translate(given).tree["data"]["train"]
    assert (train["task"], train["path"]) == ("rows", str(path))
    assert train["fields"] == {"answer": "reward_model.ground_truth", "prompt": "messages"}
    assert train.get("rewards") == ([{"task": "gsm8k"}] if "gsm8k" in name else None)


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        ("use_decoupled_loss: false, recompute_logprob: true", (True, "ignore")),
        ("use_decoupled_loss: false", (False, "clamp")),
        ("use_decoupled_loss: true, recompute_logprob: true", (True, "none")),
    ],
)
def test_the_three_ways_of_areal_to_clip(yaml_text: str, expected: tuple[bool, str], tmp_path: Path) -> None:
    text = f"gconfig: {{n_samples: 4}}\nactor: {{path: m, {yaml_text}}}"
    loss = config_of(translate(found("a.yaml", tmp_path, text)).tree).algorithm.loss
    assert (loss.decoupled, loss.behaviour_weight.rule) == expected


BOMBS = {
    "aliases.yaml": "a0: &a0 {x: 1, y: 2}\n"
    + "\n".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)),
    "itself.yaml": "actor: &a {path: x, b: *a}",
    "deep.yaml": "gconfig: " + "[" * 1000,
    "many.yaml": "gconfig: {" + ", ".join(f"k{n}: 1" for n in range(6000)) + "}",
    "deep.py": "RLOOConfig(seed=" + "-" * 5000 + "1)",
    "variables.sh": "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 9 + "swift rlhf --beta $A --num_generations 2",
    "documents.sh": "cat <<A\n" * 30_000 + "swift rlhf --num_generations 2",
    "and.sh": "&&\nswift rlhf --num_generations 2 && \n",
    "long_variable.sh": f"A={'x' * 20_000} swift rlhf --num_generations 2",
    "defaults.sh": "${A:=" * 20_000 + "swift rlhf --num_generations 2",
    "spaced.sh": "$((" * 30_000 + "\nswift rlhf --num_generations 2",
    "array.sh": "A=(" * 30_000 + "\nswift rlhf --num_generations 2",
    "open.sh": "swift rlhf --num_generations 2 " + "'${a-" * 9000,
    "sums.sh": "a=$((b+1))\nb=$((a+1))\n" * 50 + "swift rlhf --beta $((a+b)) --num_generations 2",
    "digits.py": "RLOOConfig(seed=0x" + "f" * 5000 + ", num_generations=2)",
    "odd.py": "RLOOConfig(seed=..., learning_rate=1j, model_init_kwargs={(1,): 2}, num_generations=2, **more)",
    "infinite.yaml": "actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {save_freq: .inf, n_gpus_per_node: .nan}",
    "none.yaml": "gconfig: {n_samples: 2}\nrollout: {backend: 'sglang:d0', max_concurrent_rollouts: 8}",
    "date.sh": "verl actor_rollout_ref.rollout.n=4 trainer.experiment_name=2024-02-30",
    "long.sh": "swift rlhf --num_generations 2 --reward_funcs " + "a " * 20_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_file_ends_in_a_line_or_a_config(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(BOMBS[name])
    code = main(["migrate", str(tmp_path / name)])
    output = capsys.readouterr()
    assert code in (0, 2)
    assert code == 0 or output.err.count("\n") == 1
    assert max(map(len, (output.out + output.err).splitlines())) < 20_000


def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "pipe.sh")


@pytest.mark.parametrize("end", ["2>&1 | tee train.log", "> train.log 2>&1 &", "&& echo --beta 3"])
def test_the_settings_end_where_the_command_ends(end: str, tmp_path: Path) -> None:
    given = found("run.sh", tmp_path, f"swift rlhf --num_generations 2 --learning_rate 1e-6 {end}")
    assert given.settings["learning_rate"] == 1e-6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("swift rlhf --rlhf_type grpo --model m --dataset a.jsonl --val_dataset b.jsonl --eval_steps 10", "b.jsonl"),
        ("swift rlhf --rlhf_type grpo --model m --dataset a.jsonl --eval_steps 10", None),
        ("swift rlhf --rlhf_type grpo --model m --dataset org/a --split_dataset_ratio 0 --eval_steps 10", None),
    ],
)
def test_no_training_row_is_held_out(text: str, expected: str | None, tmp_path: Path) -> None:
    held_out = _tree(text, tmp_path).get("data", {}).get("eval")
    assert (None if held_out is None else held_out["path"]) == expected


def test_an_earlier_config_of_trl_is_refused_with_its_new_names(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"got those of an earlier RLOOConfig: rloo_k; rename rloo_k to num_generations"
    ):
        _tree("trl rloo --model_name_or_path m --dataset_name d --rloo_k 4", tmp_path)


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        ("trl rloo --model_name_or_path m --dataset_name d", "--max_prompt_length 300", [300, "truncate_left"]),
        ("trl rloo --model_name_or_path m --dataset_name d", "--max_prompt_length None", [None, None]),
        (
            "swift rlhf --rlhf_type grpo --model m --dataset d",
            "--max_prompt_length 300 --truncation_strategy delete",
            [300, "filter"],
        ),
    ],
)
def test_long_prompts_are_treated_as_there(program: str, options: str, expected: list[Any], tmp_path: Path) -> None:
    data = _tree(f"{program} {options}", tmp_path)["data"]
    assert [data.get(name) for name in ("max_prompt_tokens", "overlong_prompts")] == expected


@pytest.mark.parametrize(("reward", "expected"), [("accuracy soft_overlong", 512), ("accuracy", None)])
def test_long_completions_cost_only_with_the_reward_for_them(reward: str, expected: int | None, tmp_path: Path) -> None:
    text = f"swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs {reward} --soft_cache_length 512"
    assert _tree(text, tmp_path)["algorithm"].get("rewards", {}).get("overlong_tokens") == expected


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ('load_dataset("json", data_files="mine.jsonl", split="train")', {"task": "rows", "path": "mine.jsonl"}),
        ('load_dataset("json", data_files=files)', None),
        ("load_dataset(args.name)", None),
        ('Dataset.from_json("mine.jsonl")', None),
    ],
)
def test_a_script_without_a_readable_data_set_makes_no_whole_config(
    loaded: str, expected: dict[str, str] | None, tmp_path: Path
) -> None:
    text = f"rows = {loaded}\nRLOOTrainer('m', args=RLOOConfig(beta=0.1), train_dataset=rows)\n"
    made = translate(found("train.py", tmp_path, text))
    assert made.tree.get("data", {}).get("train") == expected
    assert bool(made.refusal) == (expected is None)


def test_an_expression_of_a_script_is_no_value(tmp_path: Path) -> None:
    text = "from trl import RLOOConfig\nRLOOConfig(learning_rate=args.lr, model_name_or_path=args.model)\n"
    made = translate(found("train.py", tmp_path, text))
    assert made.tree.get("model", {}).get("path") is None
    assert "model_name_or_path=args.model: an expression of Python" in made.refusal


def _tree(text: str, folder: Path) -> dict[str, Any]:
    return translate(found("run.sh", folder, text)).tree
