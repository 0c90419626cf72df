"""The settings of TRL (1.16: a script with RLOOConfig or GRPOConfig, or a command) and of ms-swift (4.6: `swift rlhf`).

ms-swift trains with TRL's classes, so both share most names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
    adapters,
    by_hand,
    choice,
    each,
    made,
    number,
    slug,
    source,
    to,
    weight_decay,
    whole,
)
from areal_rloo.migrate.trl_rewards import BY_HAND, REWARDS, names, overlong
from areal_rloo.migrate.trl_steps import (
    HOSTS,
    PROCESSES,
    batch,
    epochs,
    gpus,
    in_batches,
    max_steps,
    part_of_batch,
    warmup,
)

_WITH_BATCH = Rule(part_of_batch, "with per_device_train_batch_size", decides=True)
_SERVER = by_hand("the worker starts the server; other options go into rollout.vllm.arguments")


def defaults(given: Given) -> Options:
    """Return the defaults of TRL or ms-swift where ours differ."""
    options: Options = {
        "algorithm.max_staleness": 0,
        "algorithm.loss.behaviour_weight.rule": "ignore",
        "learner.optimizer.betas": [0.9, 0.999],
        "learner.optimizer.learning_rate": 1e-6,
        "learner.optimizer.schedule": "linear",
        "learner.gradient_checkpointing": True,
        "learner.microbatch_tokens": "auto",
        "model.dtype": "bfloat16",
        "rollout.sampling.max_new_tokens": 512,
        "run.seed": 42,
    }
    if "advantage_estimator" in given:
        full = given.get("tuner_type", given.get("train_type", "lora")) == "full"
        options |= {
            "learner.lora": None if full else {"rank": 8, "alpha": 32},
            "learner.optimizer.learning_rate": 1e-5 if full else 1e-4,
            "learner.optimizer.betas": [0.9, 0.95],
            "learner.optimizer.weight_decay": 0.1,
            "learner.optimizer.decay_all": True,
            "learner.optimizer.schedule": "cosine",
            "rollout.sampling.temperature": 0.9,
            "rollout.sampling.top_p": 0.9,
            "rollout.sampling.top_k": 50,
            "rollout.sampling.allow_truncated": True,
            "data.overlong_prompts": "truncate_left",
        }
    if "per_device_train_batch_size" not in given:
        options |= batch(8, given)
    if "num_train_epochs" not in given:
        options |= epochs(1 if "advantage_estimator" in given else 3, given)
    return options


def _prompt_length(value: Any, given: Given) -> Options:
    longer = {} if "truncation_strategy" in given else {"data.overlong_prompts": "truncate_left"}
    return {} if value is None else {"data.max_prompt_tokens": whole(value)} | longer


def _truncated(key: str, value: Any, given: Given) -> Options:
    """top_p and top_k change the sampling distribution, which the learner's logprobs do not know."""
    wanted = max(0, int(number(value))) if key == "top_k" else number(value)
    return {f"rollout.sampling.{key}": wanted} | (
        {"rollout.sampling.allow_truncated": True} if wanted not in (0, 1) else {}
    )


def _data(value: Any, given: Given) -> Options:
    found = _sources(value, given)
    evaluated = given.get("eval_strategy", "no") != "no" or "eval_dataset" in given or "eval_steps" in given
    of_swift = "advantage_estimator" in given  # evaluates a val_dataset, or a share of the rows (split_dataset_ratio)
    has_split = not of_swift and all("path" not in one for one in found)  # a file has no test split
    chosen = _alone_or_all(found)
    return {"data.train": chosen} | ({"data.eval": chosen} if evaluated and has_split else {})


def _named(value: Any, given: Given) -> Options:
    if "dataset_name" not in given:
        raise UnreadableError("set data.train, such as {task: rows, path: rows.jsonl, fields: {...}}")
    return {}


def _held_out(value: Any, given: Given) -> Options:
    return {"data.eval": _alone_or_all(_sources(value, given))}


def _share_held_out(value: Any, given: Given) -> Options:
    if number(value) > 0:
        raise UnreadableError("data.eval names an evaluation set")
    return {}


def _sources(value: Any, given: Given) -> list[Options]:
    return [_source(str(name), given) for name in (value if isinstance(value, list) else [value])]


def _alone_or_all(sources: list[Options]) -> Options | list[Options]:
    return sources[0] if len(sources) == 1 else sources


def _source(name: str, given: Given) -> Options:
    """Read a source; ms-swift writes NAME#N for the first N rows. TRL's `accuracy_reward` is that of our task math."""
    name, _, limit = name.partition("#")
    chosen = source(name)
    if chosen["task"] == "rows" and "accuracy_reward" in names(given):
        chosen |= {"task": "math"}
    return chosen | ({"num_prompts": whole(int(limit))} if limit.isdecimal() else {})


def _system(value: Any, given: Given) -> Options:
    if str(value).endswith(".txt"):
        raise UnreadableError("a file; copy its text into data.system_prompt")
    return {"data.system_prompt": str(value)}


def _lora(value: Any, given: Given) -> Options:
    """Read the adapters by the names of peft, of TRL's command and of ms-swift."""
    if value in (False, "full"):
        return {"learner.lora": None}
    in_script, of_swift = "advantage_estimator" not in given and "lora_r" not in given, "advantage_estimator" in given
    rank, alpha = (8, 32) if of_swift else (8, 8) if in_script and "trainer" in given else (16, 32)
    rank = next((given[name] for name in ("peft_config.r", "lora_r", "lora_rank") if name in given), rank)
    alpha = next((given[name] for name in ("peft_config.lora_alpha", "lora_alpha") if name in given), alpha)
    names = ("peft_config.target_modules", "lora_target_modules", "target_modules")
    targets = next((given[name] for name in names if name in given), None)
    return adapters(rank, alpha, targets)


def _cispo(given: Given) -> Options:
    """TRL's bound of the weight is epsilon_high itself, and there is no lower bound."""
    high = given.get("epsilon_high")
    bound = {} if high is None else {"algorithm.loss.eps_high": number(high) - 1}
    return {"algorithm.loss.kind": "cispo", "algorithm.loss.eps_low": 1.0, "algorithm.loss.dual_clip": None} | bound


def _loss_type(value: Any, given: Given) -> Options:
    aggregation = {"grpo": "seq_mean_token_mean", "dapo": "token_mean", "dr_grpo": "seq_mean_token_sum_norm"}
    if value == "cispo":
        return _cispo(given)
    if value not in aggregation:
        raise UnreadableError(f"expected one of {', '.join((*aggregation, 'cispo'))}")
    return {"algorithm.loss.aggregation": aggregation[value], "algorithm.loss.count_masked": value != "dapo"}


def _clip(value: Any, given: Given) -> Options:
    if given.get("loss_type") == "cispo":
        return {}
    return {"algorithm.loss.eps_low": value, "algorithm.loss.eps_high": given.get("epsilon_high") or value}


def _dtype(value: Any, given: Given) -> Options:
    """Choose one dtype for weights and arithmetic; `bf16` decides on the arithmetic, in autocast."""
    names = str(given.get("dtype", given.get("torch_dtype", given.get("model_init_kwargs"))))
    float32 = given.get("bf16", True) is False and "bf" not in names
    return {"model.dtype": "float32" if float32 else "bfloat16"}


def _engine(value: Any, given: Given) -> Options:
    if not value:
        return {"rollout.engine": "embedded"}
    options = {"rollout.engine": "vllm", "rollout.tensor_parallel": whole(given.get("vllm_tensor_parallel_size", 1))}
    if given.get("trainer") == "GRPOTrainer" and given.get("vllm_importance_sampling_correction", True):
        weight = {"rule": "mask", "level": "sequence", "aggregate": "sum", "upper": 3.0}  # TRL's default: sequence_mask
        options |= {f"algorithm.loss.behaviour_weight.{name}": value for name, value in weight.items()}
    return options


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
            "RLOOTrainer": {"algorithm.preset": "rloo_trl"},
            "GRPOTrainer": {
                "algorithm.preset": "grpo",
                "algorithm.loss.aggregation": "token_mean",
                "algorithm.kl.coefficient": 0.0,
                "algorithm.kl.correction": "gradient",
            },
        },
        "synchronous, as TRL's trainer; algorithm.max_staleness above 0 is asynchronous",
        decides=True,
    ),
    "rlhf_type": choice({"grpo": {}}, "with advantage_estimator", decides=True),
    "advantage_estimator": choice(
        {
            "rloo": {"algorithm.preset": "rloo_ms_swift"},
            "grpo": {
                "algorithm.preset": "grpo",
                "algorithm.loss.count_masked": True,
                "algorithm.kl.correction": "none",
            },
            "reinforce_plus_plus": {
                "algorithm.preset": "reinforce_plus_plus_baseline",
                "algorithm.kl.coefficient": 0.04,
                "algorithm.kl.placement": "reward",
                "algorithm.kl.estimator": "k1",
            },
        },
        "synchronous, as ms-swift's trainer; algorithm.max_staleness above 0 is asynchronous",
        decides=True,
    ),
    "kl_in_reward": made(
        lambda value, given: {
            "algorithm.kl.placement": "reward" if value else "loss",
            "algorithm.kl.estimator": "k1" if value else "k3",
            "algorithm.kl.correction": "weight" if value else "none",
        }
    ),
    PROCESSES: made(gpus, "GPUs are split between learning and generating"),
    HOSTS: to("launcher.num_hosts", whole),
    **each("nproc_per_node nnodes", absent(f"with {PROCESSES}")),
    **dict.fromkeys(("config_file", "accelerate_config", "env.*"), absent("how the processes start")),
    "config": Rule(why="a file with more settings: put it where the script names it", by_hand=True, decides=True),
    **each("model model_name_or_path", Rule(lambda value, given: {"model.path": value}, decides=True)),
    "torch_dtype": made(_dtype),
    "dtype": made(_dtype),
    "model_init_kwargs": made(_dtype),
    "bf16": made(_dtype),
    **each("dataset dataset_name", Rule(_data, "prompts of the original set", decides=True)),
    "train_dataset": Rule(_named, "with the name of the data set", decides=True),
    "eval_dataset": absent("with the name of the data set"),
    "dataset_changes": by_hand("the script changes the rows: data.train.fields, data.system_prompt, or a file of them"),
    "val_dataset": made(_held_out),
    "dataset_*": by_hand("data.train.hub, data.train.hub_split, data.train.fields"),
    "split_dataset_ratio": made(_share_held_out),
    "system": made(_system),
    "chat_template_path": to("data.chat_template"),
    "reward_funcs": REWARDS,
    "reward_model*": by_hand("data.train.rewards=[{model: PATH}]"),
    "reward_weights": by_hand("each part in data.train.rewards has a weight"),
    "external_plugins": by_hand(BY_HAND),
    "output_dir": by_hand("the folder of a run is runs/NAME-TIME; run.folder names another"),
    "run_name": to("run.name", slug),
    "seed": to("run.seed"),
    "num_train_epochs": made(epochs),
    "max_steps": made(max_steps, "optimizer steps there, batches here"),
    "per_device_train_batch_size": Rule(batch, "the batch of all processes", decides=True),
    "gradient_accumulation_steps": _WITH_BATCH,
    "steps_per_generation": _WITH_BATCH,
    "generation_batch_size": _WITH_BATCH,
    "num_generations": _WITH_BATCH,
    "num_generations_eval": by_hand("data.eval.num_samples"),
    "per_device_eval_batch_size": absent("rollout.num_slots"),
    "num_iterations": to("learner.num_epochs_per_batch", whole),
    "max_completion_length": to("rollout.sampling.max_new_tokens"),
    "max_length": by_hand("data.max_prompt_tokens limits the prompt alone"),
    "max_prompt_length": made(_prompt_length, "the older TRL trainers cut longer prompts on the left"),
    "truncation_strategy": choice(
        {
            "delete": {"data.overlong_prompts": "filter"},
            **{side: {"data.overlong_prompts": f"truncate_{side}"} for side in ("left", "right")},
        }
    ),
    "temperature": to("rollout.sampling.temperature"),
    "top_p": made(partial(_truncated, "top_p")),
    "top_k": made(partial(_truncated, "top_k")),
    **each(
        "min_p repetition_penalty stop_words chat_template_kwargs multi_turn_scheduler max_turns loss_scale "
        "top_entropy_quantile tau_pos tau_neg off_policy_sequence_mask_delta soft_max_length",
        by_hand("changes the training, and has no counterpart by a name"),
    ),
    **each("entropy_coef", to("algorithm.loss.entropy_coefficient")),
    **each(
        "vllm_importance_sampling_* rollout_importance_sampling_*",
        by_hand("algorithm.loss.behaviour_weight; docs/algorithms.md has the names"),
    ),
    "beta": to("algorithm.kl.coefficient"),
    "epsilon": made(_clip),
    "epsilon_high": made(
        lambda value, given: {"algorithm.loss.eps_high": value} if value and given.get("loss_type") != "cispo" else {}
    ),
    "delta": to("algorithm.loss.dual_clip"),
    "loss_type": Rule(_loss_type, decides=True),
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
    "soft_cache_length": made(overlong, "no reward soft_overlong"),
    "dynamic_sample": made(lambda value, given: {"algorithm.min_reward_std": 1e-6} if value else {}),
    "max_resample_times": to("algorithm.max_filtered_batches"),
    "sync_ref_model": by_hand("model.reference.refresh_every_n_versions copies the policy; TRL mixes the two"),
    "ref_model": to("model.reference.path"),
    "ref_model_*": absent("with sync_ref_model"),
    "learning_rate": to("learner.optimizer.learning_rate"),
    "weight_decay": made(weight_decay),
    "adam_beta1": made(lambda value, given: {"learner.optimizer.betas": [value, given.get("adam_beta2", 0.999)]}),
    "adam_beta2": made(lambda value, given: {"learner.optimizer.betas": [given.get("adam_beta1", 0.9), value]}),
    "adam_epsilon": to("learner.optimizer.eps"),
    "max_grad_norm": to("learner.optimizer.max_grad_norm"),
    "lr_scheduler_type": to("learner.optimizer.schedule", _schedule),
    **each("warmup_steps warmup_ratio", made(warmup)),
    "gradient_checkpointing*": made(lambda value, given: {"learner.gradient_checkpointing": bool(value)}),
    "use_peft": made(_lora, "on all linear layers unless learner.lora.targets says which; peft chooses by the model"),
    **dict.fromkeys(("train_type", "tuner_type"), made(_lora)),
    **each("peft_config.r peft_config.lora_alpha peft_config.target_modules", absent("learner.lora")),
    **each("lora_r lora_rank lora_alpha lora_target_modules target_modules vllm_enable_lora", absent("learner.lora")),
    **each("peft_config.task_type peft_config.bias lora_task_type", absent("learner.lora")),
    **each("peft_config.* lora_*", by_hand("changes the adapters, and has no counterpart in learner.lora")),
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
    "eval_steps": made(partial(in_batches, "evaluation.every_n_versions"), "optimizer steps there, batches here"),
    "save_steps": made(partial(in_batches, "checkpoint.every_n_steps"), "optimizer steps there, batches here"),
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
