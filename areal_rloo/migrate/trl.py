"""The settings of TRL (1.16: a script with RLOOConfig or GRPOConfig, or a command) and of ms-swift (4.6: `swift rlhf`).

ms-swift trains with TRL's classes, so both share most names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_rloo.migrate.rules import (
    DEFAULT,
    SPEED,
    TELEMETRY,
    Given,
    Options,
    Rule,
    UnreadableError,
    absent,
    by_hand,
    choice,
    made,
    number,
    slug,
    source,
    to,
    whole,
)

PROCESSES = "NPROC_PER_NODE"  # the number of processes, as the command line or the script says
_WITH_BATCH = absent("with per_device_train_batch_size")
_SERVER = by_hand("the worker starts the server; other options go into rollout.vllm.arguments")
_REWARDS = by_hand(
    "data.train.rewards=[{function: FILE.py:NAME}]: a function here gets one completion, not a batch; see "
    "docs/rewards.md; accuracy_reward is the reward of the task math"
)


def batch(value: Any, given: Given) -> Options:
    """Compute the batch of all processes: TRL generates `steps_per_generation` of their batches together."""
    accumulated = whole(given.get("gradient_accumulation_steps", 1))
    steps = whole(given.get("steps_per_generation") or accumulated)
    per_process, processes = whole(given.get("per_device_train_batch_size", 8)), whole(given.get(PROCESSES, 1))
    num_samples = whole(given.get("generation_batch_size") or per_process * processes * steps)
    group = whole(given.get("num_generations", 2 if _is_rloo(given) else 8))
    if num_samples % group or steps % accumulated:
        raise UnreadableError(f"expected groups of {group} in {num_samples} samples; set learner.groups_per_step")
    return {
        "algorithm.group_size": group,
        "learner.groups_per_step": num_samples // group,
        "learner.num_minibatches": min(steps // accumulated, num_samples // group),
    }


def _is_rloo(given: Given) -> bool:
    return "GRPO" not in str(given.get("trainer", "RLOO")) and given.get("rlhf_type") != "grpo"


def _epochs(value: Any, given: Given) -> Options:
    if number(given.get("max_steps", -1)) > 0:
        return {}
    epochs = number(value)
    if epochs != int(epochs):
        raise UnreadableError("expected whole epochs; set learner.num_train_steps")
    return {"data.num_epochs": int(epochs), "learner.num_train_steps": "auto"}


def _data(value: Any, given: Given) -> Options:
    names = value if isinstance(value, list) else [value]
    found = [_source(str(name).split("#")[0], given) for name in names]
    chosen = found[0] if len(found) == 1 else found
    evaluated = given.get("eval_strategy", "no") != "no" or "eval_dataset" in given or "eval_steps" in given
    return {"data.train": chosen} | ({"data.eval": chosen} if evaluated else {})


def _source(name: str, given: Given) -> Options:
    """Read mathematics with TRL's `accuracy_reward` by our task of the same reward."""
    chosen = source(name)
    is_math = chosen["task"] == "rows" and "hub" in chosen and "accuracy_reward" in str(given.get("reward_funcs"))
    return {"task": "math", "hub": chosen["hub"]} if is_math else chosen


def _system(value: Any, given: Given) -> Options:
    if str(value).endswith(".txt"):
        raise UnreadableError("a file; copy its text into data.system_prompt")
    return {"data.system_prompt": str(value)}


def _lora(value: Any, given: Given) -> Options:
    """Read the rank and the alpha by the names of peft, of TRL's command and of ms-swift."""
    if value in (False, "full"):
        return {}
    rank = next((given[k] for k in ("peft_config.r", "lora_r", "lora_rank") if k in given), 8)
    alpha = next(
        (given[k] for k in ("peft_config.lora_alpha", "lora_alpha") if k in given), 8 if "trainer" in given else 32
    )
    return {"learner.lora": {"rank": whole(rank), "alpha": whole(alpha)}}


def _dtype(value: Any, given: Given) -> Options:
    return {"model.dtype": "bfloat16"} if "bf" in str(value) or value is True else {}


def _engine(value: Any, given: Given) -> Options:
    if not value:
        return {"rollout.engine": "embedded"}
    return {"rollout.engine": "vllm", "rollout.tensor_parallel": whole(given.get("vllm_tensor_parallel_size", 1))}


def _processes(value: Any, given: Given) -> Options:
    return {"launcher.gpus_per_host": whole(value), "learner.num_ranks": "auto", "rollout.num_workers": "auto"}


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]


def _schedule(value: Any) -> str:
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if value not in names:
        raise UnreadableError(f"expected one of {', '.join(names)}")
    return names[value]


RULES: Mapping[str, Rule] = {
    "trainer": choice(
        {
            "RLOOTrainer": {},
            "GRPOTrainer": {
                "algorithm.preset": "grpo",
                "algorithm.loss.aggregation": "token_mean",
                "algorithm.kl.coefficient": 0.0,
                "algorithm.group_size": 8,
            },
        },
        "synchronous, as TRL's trainer; algorithm.max_staleness above 0 is asynchronous",
    ),
    "rlhf_type": choice({"grpo": {}}, "with advantage_estimator"),
    "advantage_estimator": choice(
        {
            "rloo": {"algorithm.preset": "rloo_ms_swift"},
            "grpo": {"algorithm.preset": "grpo"},
            "reinforce_plus_plus": {"algorithm.preset": "reinforce_plus_plus_baseline"},
        }
    ),
    "kl_in_reward": made(lambda value, given: {"algorithm.kl.placement": "reward" if value else "loss"}),
    PROCESSES: made(_processes, "GPUs are split between learning and generating"),
    "model": to("model.path"),
    "model_name_or_path": to("model.path"),
    "torch_dtype": made(_dtype),
    "dtype": made(_dtype),
    "model_init_kwargs": made(_dtype),
    "bf16": made(_dtype),
    "dataset": made(_data, "prompts of the original set"),
    "dataset_name": made(_data, "prompts of the original set"),
    "train_dataset": absent("with the name of the data set"),
    "eval_dataset": absent("with the name of the data set"),
    "dataset_*": by_hand("data.train.hub, data.train.hub_split, data.train.fields"),
    "split_dataset_ratio": by_hand("data.eval names an evaluation set"),
    "system": made(_system),
    "reward_funcs": _REWARDS,
    "reward_model*": by_hand("data.train.rewards=[{model: PATH}]"),
    "reward_weights": by_hand("each part in data.train.rewards has a weight"),
    "external_plugins": _REWARDS,
    "output_dir": by_hand("the folder of a run is runs/NAME-TIME; run.folder names another"),
    "run_name": to("run.name", slug),
    "seed": to("run.seed"),
    "num_train_epochs": made(_epochs),
    "max_steps": made(lambda value, given: {"learner.num_train_steps": value} if value > 0 else {}),
    "per_device_train_batch_size": made(batch, "the batch of all processes"),
    "gradient_accumulation_steps": _WITH_BATCH,
    "steps_per_generation": _WITH_BATCH,
    "generation_batch_size": _WITH_BATCH,
    "num_generations": _WITH_BATCH,
    "num_generations_eval": by_hand("data.eval.num_samples"),
    "per_device_eval_batch_size": absent("rollout.num_slots"),
    "num_iterations": choice({1: {}}, "one pass over a batch"),
    "max_completion_length": to("rollout.sampling.max_new_tokens"),
    "max_length": by_hand("data.max_prompt_tokens limits the prompt alone"),
    "max_prompt_length": to("data.max_prompt_tokens"),
    "truncation_strategy": choice(
        {"delete": {"data.overlong_prompts": "filter"}, "left": {"data.overlong_prompts": "truncate"}}
    ),
    "temperature": to("rollout.sampling.temperature"),
    "top_p": to("rollout.sampling.top_p"),
    "top_k": to("rollout.sampling.top_k", lambda value: max(0, int(number(value)))),
    "min_p": absent("the learner's logprobs are of the full distribution"),
    "repetition_penalty": absent("the learner's logprobs are of the full distribution"),
    "beta": to("algorithm.kl.coefficient"),
    "epsilon": made(
        lambda value, given: {
            "algorithm.loss.eps_low": value,
            "algorithm.loss.eps_high": given.get("epsilon_high") or value,
        }
    ),
    "epsilon_high": made(lambda value, given: {"algorithm.loss.eps_high": value} if value else {}),
    "delta": to("algorithm.loss.dual_clip"),
    "loss_type": choice(
        {
            "grpo": {"algorithm.loss.aggregation": "seq_mean_token_mean", "algorithm.loss.count_masked": True},
            "dapo": {"algorithm.loss.aggregation": "token_mean"},
            "dr_grpo": {"algorithm.loss.aggregation": "seq_mean_token_sum_norm", "algorithm.loss.count_masked": True},
            "cispo": {"algorithm.loss.kind": "cispo"},
        }
    ),
    "importance_sampling_level": choice(
        {
            "token": {"algorithm.loss.ratio_level": "token"},
            "sequence": {"algorithm.loss.ratio_level": "sequence_mean"},
        }
    ),
    "scale_rewards": choice(
        {
            **{key: {"algorithm.adv_norm.std_level": "group"} for key in ("group", True)},
            "batch": {"algorithm.adv_norm.std_level": "batch"},
            **{key: {"algorithm.adv_norm.std_level": "none"} for key in ("none", False)},
        }
    ),
    "normalize_advantages": made(lambda value, given: {"algorithm.adv_norm.std_level": "batch"} if value else {}),
    "reward_clip_range": to("algorithm.rewards.clip", lambda value: None if value is None else list(value)),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), to("algorithm.rewards.mask_truncated", bool)),
    "soft_cache_length": to("algorithm.rewards.overlong_tokens"),
    "dynamic_sample": made(lambda value, given: {"algorithm.min_reward_std": 1e-6} if value else {}),
    "max_resample_times": to("algorithm.max_filtered_batches"),
    "sync_ref_model": by_hand("model.reference.refresh_every_n_versions copies the policy; TRL mixes the two"),
    "ref_model": to("model.reference.path"),
    "ref_model_*": absent("with sync_ref_model"),
    "learning_rate": to("learner.optimizer.learning_rate"),
    "weight_decay": made(
        lambda value, given: {"learner.optimizer.weight_decay": value, "learner.optimizer.decay_all": value > 0}
    ),
    "adam_beta1": made(lambda value, given: {"learner.optimizer.betas": [value, given.get("adam_beta2", 0.999)]}),
    "adam_beta2": made(lambda value, given: {"learner.optimizer.betas": [given.get("adam_beta1", 0.9), value]}),
    "adam_epsilon": to("learner.optimizer.eps"),
    "max_grad_norm": to("learner.optimizer.max_grad_norm"),
    "lr_scheduler_type": to("learner.optimizer.schedule", _schedule),
    "warmup_steps": to("learner.optimizer.warmup_steps"),
    "warmup_ratio": by_hand("a share of all steps; set learner.optimizer.warmup_steps"),
    "gradient_checkpointing*": made(lambda value, given: {"learner.gradient_checkpointing": bool(value)}),
    "use_peft": made(_lora),
    **dict.fromkeys(("train_type", "tuner_type"), made(_lora)),
    **dict.fromkeys(("peft_config.*", "lora_*", "vllm_enable_lora"), absent("with the adapters: learner.lora")),
    "target_modules": by_hand("learner.lora.targets has the names of linear layers; without it, all"),
    "use_vllm": made(_engine),
    "vllm_mode": absent("rollout.share_devices: the engine gets GPUs of its own, unless there is one"),
    "vllm_gpu_memory_utilization": absent("of a GPU that also learns; ours are apart"),
    "vllm_tensor_parallel_size": absent("with use_vllm"),
    "vllm_max_model*": absent("longest prompt and completion"),
    "vllm_*": _SERVER,
    **dict.fromkeys(("sleep_level", "offload_model", "offload_optimizer"), absent("rollout.share_devices=in_turns")),
    "move_model_batches": SPEED,
    "async_generate": absent("algorithm.max_staleness above 0 is asynchronous"),
    **dict.fromkeys(("eval_strategy", "save_strategy"), absent("by steps")),
    "eval_steps": to("evaluation.every_n_versions", lambda value: whole(value) if value else 0),
    "save_steps": to("checkpoint.every_n_steps", whole),
    "save_total_limit": to("checkpoint.keep"),
    "resume_from_checkpoint": absent("areal-rloo resume RUN_FOLDER"),
    "report_to": to("telemetry.trackers", _trackers),
    **dict.fromkeys(("log*", "num_completions_to_print"), TELEMETRY),
    "push_to_hub*": absent("areal-rloo export RUN_FOLDER --to FOLDER --push OWNER/NAME"),
    "deepspeed": absent("learner.num_ranks shards weights, gradients and states"),
    "attn_impl": DEFAULT,
    "padding_free": DEFAULT,
    "optim": absent("AdamW"),
    "disable_dropout": DEFAULT,
    "dataloader_*": absent("prompts are read once, at the start"),
    "dataset_num_proc": SPEED,
    "remove_unused_columns": DEFAULT,
}
