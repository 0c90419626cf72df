"""The examples of AReaL, verl, TRL and ms-swift for RLOO go through `migrate`: every setting is accounted for.

The texts here have the settings of these examples, as of May (AReaL), July (TRL) and August 2026 (verl, ms-swift).
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.migration import found

from areal_rloo.__main__ import main
from areal_rloo.config import Config, load_config
from areal_rloo.config.load import config_of
from areal_rloo.errors import DataError
from areal_rloo.migrate.__main__ import as_yaml, report
from areal_rloo.migrate.reading import read
from areal_rloo.migrate.translate import RULES, Translation, translate
from areal_rloo.migrate.trl_steps import PROCESSES

AREAL = """
experiment_name: gsm8k-rloo
trial_name: trial0
seed: 1
enable_offload: false
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/areal, name_resolve: {type: nfs, nfs_record_root: /tmp/n}}
scheduler: {type: null}
rollout:
  backend: "sglang:d4p1t1"
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 256
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
  scheduling_spec: ${actor.scheduling_spec}
  fileroot: ${cluster.fileroot}
  tokenizer_path: ${tokenizer_path}
  dump_to_file: true
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  backend: "fsdp:d4p1t1"
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: Qwen/Qwen2.5-1.5B-Instruct
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: {type: adam, lr: 1.70e-5, weight_decay: 0.017, beta1: 0.9, beta2: 0.999, eps: 1e-8,
    lr_scheduler_type: constant, gradient_clipping: 1.0, warmup_steps_proportion: 0.001}
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, mean_leave1out: true, std_level: null, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  max_new_tokens: ${gconfig.max_new_tokens}
  scheduling_spec: [{task_type: worker, gpu: 1}]
ref: {path: "${actor.path}", dtype: "${actor.dtype}", optimizer: null, scheduling_strategy: {type: colocation}}
sglang: {model_path: "${actor.path}", random_seed: "${seed}", skip_tokenizer_init: true, dtype: "${actor.dtype}",
  max_running_requests: null, context_length: 32768, mem_fraction_static: 0.8}
vllm: {model: "${actor.path}", seed: "${seed}", max_model_len: 32768, gpu_memory_utilization: 0.9}
train_dataset: {batch_size: 256, shuffle: true, pin_memory: true, num_workers: 4, path: openai/gsm8k, type: rl,
  max_length: 1024}
valid_dataset: {batch_size: 256, pin_memory: true, num_workers: 4, path: openai/gsm8k, type: rl}
saver: {experiment_name: "${experiment_name}", freq_epochs: 1, freq_steps: null, freq_secs: null}
recover: {mode: disabled, freq_epochs: 1, freq_secs: 3600}
evaluator: {freq_epochs: 1, freq_steps: null}
stats_logger: {wandb: {mode: disabled}}
perf_tracer: {enabled: false, session_tracer: {enabled: false}}
"""
VERL = r"""#!/usr/bin/env bash
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}   # a comment
batch=${TRAIN_BATCH_SIZE:-1024}
tokens=${PPO_MAX_TOKEN_LEN_PER_GPU:-24576}
files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
DATA=(
    algorithm.adv_estimator=rloo
    algorithm.use_kl_in_reward=True
    algorithm.kl_penalty=kl
    algorithm.kl_ctrl.kl_coef=0.001
    data.train_files="$files"
    data.val_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"
    data.train_batch_size=${batch}
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=True
    data.truncation='error'
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.balance_batch=True \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name=verl_rloo \
    trainer.experiment_name=qwen3_8b \
    trainer.n_gpus_per_node=${NGPUS_PER_NODE} \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 "$@"
"""
# The small-memory form of verl's older example: both halves on one GPU, offloaded, with adapters.
VERL_SMALL = r"""python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=512 data.truncation=left \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=5 \
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15
"""
TRL = """
import torch
from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

def main():
    train, test = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])
    arguments = RLOOConfig(
        output_dir="out", model_init_kwargs={"dtype": torch.bfloat16}, learning_rate=1e-5, log_completions=True,
        num_completions_to_print=2, max_completion_length=1024, gradient_accumulation_steps=2, steps_per_generation=8,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.5, run_name="numina",
    )
    trainer = RLOOTrainer(
        model="Qwen/Qwen3-0.6B", args=arguments, reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train, eval_dataset=test, peft_config=LoraConfig(),
    )
    trainer.train()
"""
SWIFT = r"""CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf --rlhf_type grpo --advantage_estimator rloo --kl_in_reward true --model Qwen/Qwen2.5-VL-3B-Instruct \
    --external_plugins plugin.py --reward_funcs external_r1v_acc format --use_vllm true --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.4 --vllm_tensor_parallel_size 1 --vllm_max_model_len 16384 --tuner_type lora \
    --torch_dtype bfloat16 --dataset 'AI-ModelScope/clevr_cogen_a_train' --overlong_filter false --epsilon 3e-4 \
    --epsilon_high 4e-4 --max_completion_length 1024 --num_train_epochs 1 --per_device_train_batch_size 2 \
    --learning_rate 1e-6 --gradient_accumulation_steps 4 --eval_steps 1000 --save_steps 1000 --save_total_limit 10 \
    --sleep_level 1 --offload_model true --offload_optimizer true --logging_steps 1 --dataloader_num_workers 4 \
    --num_generations 16 --temperature 1.0 --system 'prompt.txt' --deepspeed zero2 --log_completions true \
    --report_to tensorboard swanlab --num_iterations 1 --async_generate false --beta 0.001 \
    --attn_impl flash_attention_2 --padding_free true --loss_type grpo
"""
EXAMPLES = {
    "areal.yaml": AREAL,
    "verl.sh": VERL,
    "verl_small.sh": VERL_SMALL,
    "trl.py": TRL,
    "swift.sh": SWIFT,
}


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
    (tmp_path / "areal.yaml").write_text(AREAL)
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
    script = SWIFT.rstrip() + " --nonsense 'two\nlines' --per_device_eval_batch_size 4"
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
