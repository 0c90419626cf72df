"""The settings of verl (main of August 2026): hydra's `key=value` in a shell script, or the YAML of its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_rloo.migrate.rules import (
    DEFAULT,
    SPEED,
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

_TRAIN, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GPUS_EACH_HALF = "verl's processes learn and generate in turns on all GPUs; half of them learn here, half generate"


def _sources(value: Any, given: Given) -> Any:
    names = value if isinstance(value, list) else [value]
    found = [source(name) for name in names]
    return found[0] if len(found) == 1 else found


def _minibatches(value: Any, given: Given) -> Options:
    batch, mini = whole(given.get("data.train_batch_size", value)), whole(value)
    if batch % mini:
        raise UnreadableError(f"expected a divisor of data.train_batch_size={batch}; set learner.num_minibatches")
    return {"learner.num_minibatches": batch // mini}


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


def _kl_in_reward(value: Any, given: Given) -> Options:
    return {"algorithm.kl.placement": "reward"} if value else {}


def _kl_coefficient(value: Any, given: Given) -> Options:
    return {"algorithm.kl.coefficient": number(value)} if given.get("algorithm.use_kl_in_reward") else {}


def _kl_loss(value: Any, given: Given) -> Options:
    if not value:
        return {}
    return {
        "algorithm.kl.placement": "loss",
        "algorithm.kl.coefficient": number(given.get(f"{_TRAIN}.kl_loss_coef", 0.001)),
    }


def _estimator(value: Any) -> str:
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    if value not in names:
        raise UnreadableError(f"expected one of {', '.join(names)}")
    return names[value]


def _preset(name: str) -> Options:
    return {"algorithm.preset": name, "algorithm.loss.behaviour_weight.rule": "ignore", "algorithm.max_staleness": 0}


def _epochs(value: Any, given: Given) -> Options:
    return {"data.num_epochs": whole(value), "learner.num_train_steps": "auto"}


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in ("wandb", "tensorboard", "mlflow")]


def _every(value: Any) -> int:
    return max(0, int(number(value)))  # -1: never


RULES: Mapping[str, Rule] = {
    "algorithm.adv_estimator": choice(
        {
            "rloo": _preset("rloo_verl"),
            "rloo_vectorized": _preset("rloo_verl"),
            "grpo": _preset("grpo") | {"algorithm.loss.aggregation": "token_mean", "algorithm.loss.dual_clip": 3.0},
            "reinforce_plus_plus": _preset("reinforce_plus_plus"),
            "reinforce_plus_plus_baseline": _preset("reinforce_plus_plus_baseline"),
        },
        "synchronous, as verl's trainer; algorithm.max_staleness above 0 is asynchronous",
    ),
    "algorithm.norm_adv_by_std_in_grpo": made(
        lambda value, given: {} if value else {"algorithm.adv_norm.std_level": "none"}, "of GRPO"
    ),
    "algorithm.use_kl_in_reward": made(_kl_in_reward),
    "algorithm.kl_penalty": to("algorithm.kl.estimator", _estimator),
    "algorithm.kl_ctrl.kl_coef": made(_kl_coefficient),
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
    "algorithm.*": by_hand("see docs/algorithms.md"),
    "data.train_files": made(
        lambda value, given: {"data.train": _sources(value, given)}, "prompts of the original set"
    ),
    "data.val_files": made(lambda value, given: {"data.eval": _sources(value, given)}, "prompts of the original set"),
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
    "data.prompt_key": by_hand("data.train.fields maps the field"),
    "data.reward_fn_key": by_hand("data.train.rewards"),
    "data.*": absent("no counterpart"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.use_remove_padding": DEFAULT,
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("learner.gradient_checkpointing"),
    "actor_rollout_ref.model.lora_rank": made(
        lambda value, given: (
            {"learner.lora": {"rank": value, "alpha": given.get("actor_rollout_ref.model.lora_alpha", 16)}}
            if value
            else {}
        )
    ),
    "actor_rollout_ref.model.lora_alpha": absent("with lora_rank"),
    "actor_rollout_ref.model.target_modules": absent("all linear layers; learner.lora.targets says which"),
    "actor_rollout_ref.model.*": SPEED,
    f"{_TRAIN}.optim.lr": made(
        lambda value, given: {
            "learner.optimizer.learning_rate": value,
            "learner.optimizer.betas": list(given.get(f"{_TRAIN}.optim.betas", [0.9, 0.999])),
            "learner.optimizer.weight_decay": given.get(f"{_TRAIN}.optim.weight_decay", 0.01),
            "learner.optimizer.decay_all": given.get(f"{_TRAIN}.optim.weight_decay", 0.01) > 0,
        },
        "with verl's betas and weight decay, of all parameters",
    ),
    f"{_TRAIN}.optim.weight_decay": absent("with lr"),
    f"{_TRAIN}.optim.betas": absent("with lr"),
    f"{_TRAIN}.optim.lr_warmup_steps": to("learner.optimizer.warmup_steps", _every),
    f"{_TRAIN}.optim.lr_warmup_steps_ratio": by_hand("a share of all steps; set learner.optimizer.warmup_steps"),
    f"{_TRAIN}.optim.*": absent("learner.optimizer"),
    f"{_TRAIN}.grad_clip": to("learner.optimizer.max_grad_norm"),
    f"{_TRAIN}.ppo_mini_batch_size": made(_minibatches),
    f"{_TRAIN}.ppo_epochs": choice({1: {}}, "one pass over a batch"),
    f"{_TRAIN}.ppo_micro_batch_size_per_gpu": by_hand("in samples; learner.microbatch_tokens is in tokens, or auto"),
    f"{_TRAIN}.ppo_max_token_len_per_gpu": to("learner.microbatch_tokens"),
    f"{_TRAIN}.use_dynamic_bsz": DEFAULT,
    f"{_TRAIN}.use_kl_loss": made(_kl_loss),
    f"{_TRAIN}.kl_loss_coef": absent("with use_kl_loss"),
    f"{_TRAIN}.kl_loss_type": made(
        lambda value, given: {"algorithm.kl.estimator": _estimator(value)} if given.get(f"{_TRAIN}.use_kl_loss") else {}
    ),
    f"{_TRAIN}.entropy_coeff": to("algorithm.loss.entropy_coefficient"),
    f"{_TRAIN}.clip_ratio": made(
        lambda value, given: {
            "algorithm.loss.eps_low": given.get(f"{_TRAIN}.clip_ratio_low", value),
            "algorithm.loss.eps_high": given.get(f"{_TRAIN}.clip_ratio_high", value),
        }
    ),
    f"{_TRAIN}.clip_ratio_low": to("algorithm.loss.eps_low"),
    f"{_TRAIN}.clip_ratio_high": to("algorithm.loss.eps_high"),
    f"{_TRAIN}.clip_ratio_c": to("algorithm.loss.dual_clip"),
    f"{_TRAIN}.loss_agg_mode": choice(
        {
            name: {"algorithm.loss.aggregation": name.replace("-", "_")}
            for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
        }
    ),
    f"{_TRAIN}.policy_loss.loss_mode": choice(
        {
            "vanilla": {},
            "gspo": {"algorithm.loss.ratio_level": "sequence_mean"},
            "cispo": {"algorithm.loss.kind": "cispo"},
        }
    ),
    f"{_TRAIN}.fsdp_config.param_offload": made(
        lambda value, given: {"learner.offload": "parameters"} if value else {}
    ),
    f"{_TRAIN}.fsdp_config.optimizer_offload": made(
        lambda value, given: (
            {"learner.offload": "optimizer"} if value and not given.get(f"{_TRAIN}.fsdp_config.param_offload") else {}
        )
    ),
    f"{_TRAIN}.*": SPEED,
    f"{_ROLLOUT}.name": choice({"vllm": {"rollout.engine": "vllm"}, "sglang": {"rollout.engine": "sglang"}}),
    f"{_ROLLOUT}.n": to("algorithm.group_size"),
    f"{_ROLLOUT}.temperature": to("rollout.sampling.temperature"),
    f"{_ROLLOUT}.top_p": to("rollout.sampling.top_p"),
    f"{_ROLLOUT}.top_k": to("rollout.sampling.top_k", _every),
    f"{_ROLLOUT}.tensor_model_parallel_size": to("rollout.tensor_parallel"),
    f"{_ROLLOUT}.gpu_memory_utilization": absent("of a GPU that also learns; ours are apart"),
    f"{_ROLLOUT}.log_prob_*": absent("the microbatches of the learner"),
    f"{_ROLLOUT}.val_kwargs.*": by_hand("each set in data.eval has num_samples, temperature, top_p and top_k"),
    f"{_ROLLOUT}.multi_turn.*": by_hand("rollout.episode; see docs/agents.md"),
    f"{_ROLLOUT}.*": SPEED,
    "actor_rollout_ref.ref.fsdp_config.param_offload": to("model.reference.offload"),
    "actor_rollout_ref.ref.*": absent("the reference is computed in the microbatches of the learner"),
    "actor_rollout_ref.*": SPEED,
    "reward_model.enable": choice({False: {}}, "data.train.rewards=[{model: PATH}]"),
    "reward_model.*": by_hand("data.train.rewards"),
    "reward.*": by_hand("data.train.rewards"),
    "custom_reward_function.*": by_hand("data.train.rewards=[{function: FILE.py:NAME}]; see docs/rewards.md"),
    "critic.*": absent("there is no critic"),
    "trainer.critic_warmup": absent("there is no critic"),
    "trainer.logger": to("telemetry.trackers", _trackers),
    "trainer.project_name": absent("run.name"),
    "trainer.experiment_name": to("run.name", slug),
    "trainer.n_gpus_per_node": made(_gpus, _GPUS_EACH_HALF),
    "trainer.nnodes": to("launcher.num_hosts"),
    "trainer.save_freq": to("checkpoint.every_n_steps", _every),
    "trainer.test_freq": to("evaluation.every_n_versions", _every),
    "trainer.total_epochs": made(_epochs),
    "trainer.total_training_steps": to("learner.num_train_steps"),
    "trainer.val_before_train": DEFAULT,
    "trainer.balance_batch": DEFAULT,
    "trainer.resume_mode": absent("areal-rloo resume RUN_FOLDER"),
    "trainer.default_local_dir": by_hand("the folder of a run is runs/NAME-TIME; run.folder names another"),
    "trainer.*": absent("no counterpart"),
    "async_training.staleness_threshold": by_hand("a share of a batch; algorithm.max_staleness is in versions"),
    "async_training.trigger_parameter_sync_step": to("weights.publish_every_n_steps"),
    "ray_kwargs.*": absent("areal-rloo run --launcher ray"),
    "ray_init.*": absent("areal-rloo run --launcher ray"),
}


def _truncation(given: Given) -> str:
    """verl's `left` keeps the end of a prompt, as our `truncate`."""
    names = {"error": "error", "left": "truncate"}
    value = given.get("data.truncation", "error")
    if value not in names:
        raise UnreadableError("data.truncation: expected error or left; ours keeps the end of a prompt")
    return names[value]
