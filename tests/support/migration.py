"""Files of other systems, read as `areal-rloo migrate` reads them.

The examples have the settings of these systems' own, as of May (AReaL), July (TRL) and August 2026 (verl, ms-swift).
"""

from pathlib import Path

import msgspec

from areal_rloo.migrate.reading import Found, read
from areal_rloo.migrate.translate import translate

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


def found(name: str, folder: Path, text: str, **settings: object) -> Found:
    """Write a file and read it, with more settings."""
    path = folder / name
    path.write_text(text)
    given = read(path)
    return msgspec.structs.replace(given, settings=given.settings | settings)


def by_hand(given: Found) -> dict[str, str]:
    return {line.name: line.why for line in translate(given).lines if line.fate == "hand"}
