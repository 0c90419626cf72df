"""The settings of verl (main of August 2026): hydra's `key=value` in a shell script, or the YAML of its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from areal_rloo.migrate.rules import (
    CRITIC,
    DEFAULT,
    SPEED,
    Given,
    Options,
    Rule,
    UnreadableError,
    absent,
    adapters,
    by_hand,
    choice,
    each,
    epochs,
    made,
    number,
    slug,
    source,
    to,
    weight_decay,
    whole,
)

_TRAIN, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_PROMPTS = "the rows of verl's prepared parquet; of the original set if this host has no such file"
_GPUS_EACH_HALF = "verl's processes learn and generate in turns on all GPUs; half of them learn here, half generate"


def _sources(value: Any, given: Given) -> Any:
    names = value if isinstance(value, list) else [value]
    found = [_source(str(name), given) for name in names]
    return found[0] if len(found) == 1 else found


def _source(path: str, given: Given) -> Options:
    """Read prepared parquet as it is, with verl's prompts; a known set that this host lacks from the hub."""
    found = source(path)
    task, prompt = found["task"], given.get("data.prompt_key", "prompt")
    if not path.endswith(".parquet") or not (task == "rows" or Path(path).is_file()):
        return found
    fields = {"answer": "reward_model.ground_truth"} | ({} if prompt == "prompt" else {"prompt": str(prompt)})
    known = {} if task == "rows" else {"name": task, "rewards": [{"task": task}]}
    return {"task": "rows", "path": path, "fields": fields, **known}


def _num_minibatches(given: Given) -> int:
    batch, mini = (
        whole(given.get("data.train_batch_size") or 1024),
        whole(given.get(f"{_TRAIN}.ppo_mini_batch_size") or 256),
    )
    return max(1, batch // mini)


def _minibatches(value: Any, given: Given, *, checked: bool = True) -> Options:
    batch = given.get("data.train_batch_size", 1024)
    if checked and (whole(batch) % whole(value)):
        raise UnreadableError(f"expected a divisor of data.train_batch_size={batch}; set learner.num_minibatches")
    try:
        return {"learner.num_minibatches": _num_minibatches(given)}
    except UnreadableError:
        return {}


def _gpus(value: Any, given: Given) -> Options:
    """Split the GPUs of verl's colocated processes between learner ranks and rollout workers."""
    num, parallel = whole(value), whole(given.get(f"{_ROLLOUT}.tensor_model_parallel_size", 1))
    total = num * whole(given.get("trainer.nnodes", 1))
    if total < 1 + parallel:
        return {"launcher.gpus_per_host": num, "rollout.share_devices": "in_turns"}
    num_workers = max(1, total // 2 // parallel)
    return {
        "launcher.gpus_per_host": num,
        "rollout.num_workers": num_workers,
        "learner.num_ranks": total - num_workers * parallel,
    }


def defaults(given: Given) -> Options:
    """Return the defaults of verl where ours differ."""
    options: Options = {
        "model.dtype": "bfloat16",
        "algorithm.group_size": 1,
        "algorithm.max_staleness": 0,
        "algorithm.loss.behaviour_weight.rule": "ignore",
        "algorithm.kl.coefficient": 0.0,
        "learner.groups_per_step": 1024,
        "learner.microbatch_tokens": "auto",
        "rollout.sampling.max_new_tokens": 512,
    }
    options |= _minibatches(given.get(f"{_TRAIN}.ppo_mini_batch_size", 256), given, checked=False)
    return options | _rate(1e-6, given) | epochs(30, given)


def _rate(value: Any, given: Given) -> Options:
    rate: Options = {
        "learner.optimizer.learning_rate": number(value),
        "learner.optimizer.betas": list(given.get(f"{_TRAIN}.optim.betas", [0.9, 0.999])),
    }
    return rate | weight_decay(given.get(f"{_TRAIN}.optim.weight_decay", 0.01), given)


def _kl_in_reward(value: Any, given: Given) -> Options:
    """Read the KL term of the reward; verl may have another in the loss, and ours has one."""
    if not value:
        return {}
    if given.get(f"{_TRAIN}.use_kl_loss"):
        raise UnreadableError("expected one KL term, in the reward or in the loss; choose algorithm.kl.placement")
    return {
        "algorithm.kl.placement": "reward",
        "algorithm.kl.coefficient": number(given.get("algorithm.kl_ctrl.kl_coef", 0.001)),
        "algorithm.kl.estimator": _estimator(given.get("algorithm.kl_penalty", "kl")),
    }


def _kl_loss(value: Any, given: Given) -> Options:
    if not value or given.get("algorithm.use_kl_in_reward"):
        return {}
    return {
        "algorithm.kl.placement": "loss",
        "algorithm.kl.coefficient": number(given.get(f"{_TRAIN}.kl_loss_coef", 0.001)),
        "algorithm.kl.estimator": _estimator(given.get(f"{_TRAIN}.kl_loss_type", "low_var_kl")),
        "algorithm.kl.correction": "none",
    }


def _warmup(value: Any, given: Given) -> Options:
    """verl's schedule steps once a batch, and ours with every minibatch of every pass."""
    steps, passes = max(0, int(number(value))), whole(given.get(f"{_TRAIN}.ppo_epochs", 1))
    return {"learner.optimizer.warmup_steps": steps * _num_minibatches(given) * passes}


def _warmup_share(value: Any, given: Given) -> Options:
    """Steps come before a share, as in verl."""
    has_steps = number(given.get(f"{_TRAIN}.optim.lr_warmup_steps", -1)) > 0
    return {} if number(value) <= 0 or has_steps else {"learner.optimizer.warmup_share": value}


def _schedule(value: Any) -> str:
    if value not in ("constant", "cosine", "linear"):
        raise UnreadableError("expected constant, cosine or linear")
    return str(value)


def _lora(value: Any, given: Given) -> Options:
    if not value:
        return {}
    model = "actor_rollout_ref.model"
    alpha = given.get(f"{model}.lora_alpha", given.get(f"{model}.lora.alpha", 16))
    return adapters(value, alpha, given.get(f"{model}.target_modules"))


def _limit(key: str, value: Any, given: Given) -> Options:
    if number(value) < 0:
        return {}
    sources = _sources(given.get("data.train_files" if key == "data.train" else "data.val_files", ""), given)
    if isinstance(sources, list):
        raise UnreadableError("num_prompts of each source")
    return {key: {**sources, "num_prompts": whole(value)}}


def _loss(value: Any, given: Given) -> Options:
    losses: dict[str, Options] = {
        "vanilla": {},
        "gspo": {
            "algorithm.loss.ratio_level": "sequence_mean",
            "algorithm.loss.aggregation": "seq_mean_token_mean",
            "algorithm.loss.dual_clip": None,
        },
        "cispo": {"algorithm.loss.kind": "cispo", "algorithm.loss.dual_clip": None},
    }
    if value not in losses:
        raise UnreadableError(f"expected one of {', '.join(losses)}")
    return losses[value]


def _estimator(value: Any) -> str:
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if value not in names:
        raise UnreadableError(f"expected one of {', '.join(names)}")
    return names[value]


def _preset(name: str, **more: Any) -> Options:
    return {"algorithm.preset": name, "algorithm.kl.coefficient": 0.0} | more


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in ("wandb", "tensorboard", "mlflow")]


def _every(value: Any) -> int:
    return max(0, int(number(value)))  # -1: never


RULES: Mapping[str, Rule] = {
    "algorithm.adv_estimator": choice(
        {
            **dict.fromkeys(("rloo", "rloo_vectorized"), _preset("rloo_verl")),
            "grpo": _preset("grpo", **{"algorithm.loss.aggregation": "token_mean", "algorithm.loss.dual_clip": 3.0}),
            "reinforce_plus_plus": _preset("reinforce_plus_plus", **{"algorithm.loss.dual_clip": 3.0}),
            "reinforce_plus_plus_baseline": _preset(
                "reinforce_plus_plus_baseline", **{"algorithm.loss.dual_clip": 3.0}
            ),
        },
        "synchronous, as verl's trainer; algorithm.max_staleness above 0 is asynchronous",
        decides=True,
    ),
    "algorithm.norm_adv_by_std_in_grpo": made(
        lambda value, given: {} if value else {"algorithm.adv_norm.std_level": "none"}, "of GRPO"
    ),
    "algorithm.use_kl_in_reward": made(_kl_in_reward),
    "algorithm.kl_penalty": absent("with use_kl_in_reward"),
    "algorithm.kl_ctrl.kl_coef": absent("with use_kl_in_reward"),
    "algorithm.kl_ctrl.type": choice({"fixed": {}, "adaptive": {"algorithm.kl.adaptive": {}}}),
    "algorithm.kl_ctrl.target_kl": made(
        lambda value, given: (
            {"algorithm.kl.adaptive.target": value} if given.get("algorithm.kl_ctrl.type") == "adaptive" else {}
        )
    ),
    "algorithm.kl_ctrl.horizon": made(
        lambda value, given: (
            {"algorithm.kl.adaptive.horizon": value} if given.get("algorithm.kl_ctrl.type") == "adaptive" else {}
        )
    ),
    "algorithm.gamma": to("algorithm.discount"),
    "algorithm.lam": absent("of GAE; there is no critic"),
    "algorithm.filter_groups.enable": made(lambda value, given: {"algorithm.min_reward_std": 1e-6} if value else {}),
    "algorithm.filter_groups.max_num_gen_batches": to("algorithm.max_filtered_batches"),
    "algorithm.rollout_correction.*": by_hand("algorithm.loss.behaviour_weight; docs/algorithms.md has the names"),
    "data.train_files": made(lambda value, given: {"data.train": _sources(value, given)}, _PROMPTS),
    "data.val_files": made(lambda value, given: {"data.eval": _sources(value, given)}, _PROMPTS),
    "data.train_batch_size": to("learner.groups_per_step"),
    "data.val_batch_size": absent("an evaluation has all prompts; data.eval.num_prompts limits them"),
    "data.max_prompt_length": to("data.max_prompt_tokens"),
    "data.max_response_length": to("rollout.sampling.max_new_tokens"),
    "data.filter_overlong_prompts": made(
        lambda value, given: {"data.overlong_prompts": "filter" if value else _truncation(given)}
    ),
    "data.filter_overlong_prompts_workers": SPEED,
    "data.truncation": made(
        lambda value, given: (
            {} if given.get("data.filter_overlong_prompts") else {"data.overlong_prompts": _truncation(given)}
        )
    ),
    "data.shuffle": choice({True: {}}, "prompts are shuffled in every epoch"),
    "data.seed": to("run.seed"),
    "data.prompt_key": absent("with the files: data.train.fields"),
    "data.reward_fn_key": by_hand("data.train.rewards"),
    "data.train_max_samples": made(partial(_limit, "data.train")),
    "data.val_max_samples": made(partial(_limit, "data.eval")),
    **each("return_raw_chat return_raw_input_ids return_full_prompt dataloader_num_workers", DEFAULT, "data."),
    **each("apply_chat_template_kwargs.* custom_cls.* sampler.* image_key", by_hand("changes the prompts"), "data."),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.custom_chat_template": to("data.chat_template"),
    "actor_rollout_ref.model.use_remove_padding": DEFAULT,
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("learner.gradient_checkpointing"),
    **each("lora_rank lora.rank", made(_lora), "actor_rollout_ref.model."),
    **each("lora_alpha lora.alpha target_modules", absent("with the rank"), "actor_rollout_ref.model."),
    **each(
        "enable_activation_offload use_fused_kernels fused_kernel_options.* use_shm use_liger tiled_mlp.* "
        "trust_remote_code external_lib override_config.attn_implementation",
        SPEED,
        "actor_rollout_ref.model.",
    ),
    f"{_TRAIN}.optim.lr": made(_rate, "with verl's betas and weight decay, of all parameters"),
    f"{_TRAIN}.optim.weight_decay": absent("with lr"),
    f"{_TRAIN}.optim.betas": absent("with lr"),
    f"{_TRAIN}.optim.lr_warmup_steps": made(_warmup, "minibatches"),
    f"{_TRAIN}.optim.lr_warmup_steps_ratio": made(_warmup_share),
    f"{_TRAIN}.optim.total_training_steps": absent("learner.num_train_steps"),
    f"{_TRAIN}.optim.lr_scheduler_type": to("learner.optimizer.schedule", _schedule),
    f"{_TRAIN}.optim.warmup_style": to("learner.optimizer.schedule", _schedule),
    f"{_TRAIN}.optim.min_lr_ratio": to("learner.optimizer.final_share"),
    **each(f"{_TRAIN}.grad_clip {_TRAIN}.optim.clip_grad", to("learner.optimizer.max_grad_norm")),
    f"{_TRAIN}.ppo_mini_batch_size": made(_minibatches),
    f"{_TRAIN}.ppo_epochs": to("learner.num_epochs_per_batch", whole),
    f"{_TRAIN}.ppo_micro_batch_size_per_gpu": by_hand("in samples; learner.microbatch_tokens is in tokens, or auto"),
    f"{_TRAIN}.ppo_max_token_len_per_gpu": to("learner.microbatch_tokens"),
    f"{_TRAIN}.use_dynamic_bsz": DEFAULT,
    f"{_TRAIN}.use_kl_loss": made(_kl_loss),
    f"{_TRAIN}.kl_loss_coef": absent("with use_kl_loss"),
    f"{_TRAIN}.kl_loss_type": absent("with use_kl_loss"),
    f"{_TRAIN}.entropy_coeff": to("algorithm.loss.entropy_coefficient"),
    f"{_TRAIN}.clip_ratio": absent("verl reads clip_ratio_low and clip_ratio_high, 0.2 unless set"),
    f"{_TRAIN}.clip_ratio_low": to("algorithm.loss.eps_low"),
    f"{_TRAIN}.clip_ratio_high": to("algorithm.loss.eps_high"),
    f"{_TRAIN}.clip_ratio_c": to("algorithm.loss.dual_clip"),
    f"{_TRAIN}.loss_agg_mode": choice(
        {
            name: {"algorithm.loss.aggregation": name.replace("-", "_")}
            for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
        }
    ),
    f"{_TRAIN}.policy_loss.loss_mode": Rule(_loss, decides=True),
    f"{_TRAIN}.fsdp_config.param_offload": made(
        lambda value, given: {"learner.offload": "parameters"} if value else {}
    ),
    f"{_TRAIN}.fsdp_config.optimizer_offload": made(
        lambda value, given: (
            {"learner.offload": "optimizer"} if value and not given.get(f"{_TRAIN}.fsdp_config.param_offload") else {}
        )
    ),
    **each(
        "ppo_micro_batch_size use_torch_compile ulysses_sequence_parallel_size fsdp_config.* megatron.* strategy "
        "checkpoint.* entropy_checkpointing entropy_from_logits_with_chunking profiler.* engine.* calculate_entropy "
        "use_remove_padding use_fused_kernels data_loader_seed log_prob_*",
        SPEED,
        f"{_TRAIN}.",
    ),
    f"{_TRAIN}.shuffle": absent("minibatches are drawn anew in every step"),
    f"{_ROLLOUT}.name": choice({"vllm": {"rollout.engine": "vllm"}, "sglang": {"rollout.engine": "sglang"}}),
    f"{_ROLLOUT}.n": to("algorithm.group_size"),
    f"{_ROLLOUT}.temperature": to("rollout.sampling.temperature"),
    f"{_ROLLOUT}.top_p": to("rollout.sampling.top_p"),
    f"{_ROLLOUT}.top_k": to("rollout.sampling.top_k", _every),
    f"{_ROLLOUT}.tensor_model_parallel_size": to("rollout.tensor_parallel"),
    f"{_ROLLOUT}.gpu_memory_utilization": absent("of a GPU that also learns; ours are apart"),
    f"{_ROLLOUT}.log_prob_*": absent("the microbatches of the learner"),
    f"{_ROLLOUT}.val_kwargs.*": by_hand("each set in data.eval has num_samples, temperature, top_p and top_k"),
    f"{_ROLLOUT}.multi_turn.*": by_hand("rollout.episode.type=tool_use; tools=[FILE.py:FUNCTION]; see docs/tasks.md"),
    **each(
        "enforce_eager free_cache_engine max_num_batched_tokens max_num_seqs max_model_len enable_chunked_prefill "
        "enable_prefix_caching load_format layered_summon dtype mode disable_log_stats data_parallel_size "
        "engine_kwargs.* agent.num_workers calculate_log_probs update_weights_bucket_megabytes checkpoint_engine.* "
        "skip_tokenizer_init prompt_length response_length seed trace.* prometheus.* profiler.* "
        "pipeline_model_parallel_size expert_parallel_size cudagraph_capture_sizes max_parallel_loading_workers",
        SPEED,
        f"{_ROLLOUT}.",
    ),
    f"{_ROLLOUT}.agent.*": by_hand("rollout.episode; see docs/agents.md"),
    **each("ignore_eos repetition_penalty min_p", by_hand("no counterpart in rollout.sampling"), f"{_ROLLOUT}."),
    "actor_rollout_ref.ref.fsdp_config.param_offload": to("model.reference.offload"),
    "actor_rollout_ref.ref.*": absent("the reference is computed in the microbatches of the learner"),
    **each("hybrid_engine nccl_timeout", SPEED, "actor_rollout_ref."),
    "reward_model.enable": choice({False: {}}, "data.train.rewards=[{model: PATH}]"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": by_hand(
        "algorithm.rewards.overlong_tokens and algorithm.rewards.overlong_penalty"
    ),
    "reward_model.reward_manager": by_hand("data.train.rewards; the tasks gsm8k and math have verl's rewards"),
    "reward_model.*": by_hand("data.train.rewards"),
    "reward.*": by_hand("data.train.rewards"),
    "custom_reward_function.*": by_hand("data.train.rewards=[{function: FILE.py:NAME}]; see docs/rewards.md"),
    "critic.*": CRITIC,
    "trainer.critic_warmup": absent("there is no critic"),
    "trainer.logger": to("telemetry.trackers", _trackers),
    "trainer.project_name": absent("run.name"),
    "trainer.experiment_name": to("run.name", slug),
    "trainer.n_gpus_per_node": made(_gpus, _GPUS_EACH_HALF),
    "trainer.nnodes": to("launcher.num_hosts"),
    "trainer.save_freq": to("checkpoint.every_n_steps", _every),
    "trainer.test_freq": to("evaluation.every_n_versions", _every),
    "trainer.total_epochs": made(epochs),
    "trainer.total_training_steps": to("learner.num_train_steps"),
    "trainer.val_before_train": absent("a run begins with an evaluation, unless data.eval is null"),
    "trainer.balance_batch": DEFAULT,
    "trainer.resume_mode": absent("areal-rloo resume RUN_FOLDER"),
    "trainer.default_local_dir": by_hand("the folder of a run is runs/NAME-TIME; run.folder names another"),
    **each(
        "log_val_generations rollout_data_dir validation_data_dir",
        absent("all samples of an evaluation, and some of each step, are recorded"),
        "trainer.",
    ),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep"),
    "trainer.max_critic_ckpt_to_keep": CRITIC,
    "trainer.val_only": choice({False: {}}, "areal-rloo evaluate measures a model without training"),
    **each(
        "device ray_wait_register_center_timeout use_legacy_worker_impl del_local_ckpt_after_load default_hdfs_dir "
        "esi_redundant_time remove_previous_ckpt_in_save",
        absent("how that system keeps its processes and files; checkpoint.keep limits the checkpoints"),
        "trainer.",
    ),
    **each("global_profiler.* skip.* transfer_queue.* hydra.*", SPEED),
    "sandbox_fusion.*": by_hand("data.train.rewards"),
    "async_training.staleness_threshold": by_hand("a share of a batch; algorithm.max_staleness is in versions"),
    "async_training.trigger_parameter_sync_step": to("weights.publish_every_n_steps"),
    "async_training.partial_rollout": DEFAULT,
    "async_training.*": by_hand("a learner and a rollout of their own; see docs/advice.md for a split"),
    **each("rollout.nnodes rollout.n_gpus_per_node", by_hand("rollout.num_workers = GPUs / rollout.tensor_parallel")),
    "rollout.total_rollout_steps": by_hand("in prompts; learner.num_train_steps is in batches"),
    "ray_kwargs.*": absent("areal-rloo run --launcher ray"),
    "ray_init.*": absent("areal-rloo run --launcher ray"),
}


def _truncation(given: Given) -> str:
    names = {"error": "error", **{side: f"truncate_{side}" for side in ("left", "right", "middle")}}
    value = given.get("data.truncation", "error")
    if value not in names:
        raise UnreadableError(f"data.truncation: expected one of {', '.join(names)}")
    return names[value]
