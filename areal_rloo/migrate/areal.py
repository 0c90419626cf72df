"""The settings of AReaL (2.0, main of August 2026): a YAML file of its `PPOConfig`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from areal_rloo.migrate.rules import (
    CRITIC,
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
    epochs,
    made,
    number,
    slug,
    source,
    to,
    weight_decay,
    whole,
)

_ALLOCATION = re.compile(r"(?P<rollout>(?:sglang|vllm):[a-z0-9]+)\+(?P<train>(?:\w+:)?[a-z0-9]+)")
_BACKEND = re.compile(r"(?:(?P<kind>\w+):)?(?P<degrees>([a-z]\d+)+)")
_EPOCHS = by_hand("in epochs: an epoch has prompts / learner.groups_per_step steps; set the option in steps")


def _allocation(value: Any, given: Given) -> Options:
    """Read `sglang:d4p1t1+fsdp:d4p1t1`: the backends of the rollout and of the training."""
    found = _ALLOCATION.fullmatch(str(value))
    if found is None:
        raise UnreadableError("expected ENGINE:dNpNtN+dNpNtN; set rollout.num_workers and learner.num_ranks")
    return _rollout_backend(found["rollout"], given) | _learner_backend(found["train"], given)


def _degrees(value: Any) -> tuple[str, dict[str, int]]:
    """Read `sglang:d4p1t1`: the kind, and the data, pipeline, tensor parallel degrees by letter."""
    found = _BACKEND.fullmatch(str(value))
    if found is None:
        raise UnreadableError("expected KIND:dNpNtN")
    return found["kind"] or "", {letter: int(n) for letter, n in re.findall(r"([a-z])(\d+)", found["degrees"])}


def _rollout_backend(value: Any, given: Given) -> Options:
    kind, degrees = _degrees(value)
    return {
        "rollout.engine": kind if kind in ("sglang", "vllm") else "sglang",
        "rollout.num_workers": degrees.get("d", 1),
        "rollout.tensor_parallel": degrees.get("t", 1) * degrees.get("p", 1),
    }


def _learner_backend(value: Any, given: Given) -> Options:
    return {"learner.num_ranks": math.prod(_degrees(value)[1].values())}


def defaults(given: Given) -> Options:
    """Return the defaults of AReaL where ours differ."""
    options: Options = {
        "model.dtype": "bfloat16",
        "rollout.num_workers": "auto",
        "rollout.sampling.max_new_tokens": 16384,
        "algorithm.max_staleness": 0,
        "algorithm.rewards.clip": [-20.0, 20.0],
        "learner.num_minibatches": 4,
        "learner.microbatch_tokens": "auto",
        "learner.optimizer.learning_rate": 1e-5,
    }
    if given.get("actor.use_decoupled_loss"):
        options["actor"] = {"rejection_sampling": None}  # keeps w without a bound
    if "actor.use_decoupled_loss" not in given:
        options |= _decoupled(False, given)
    if "actor.kl_ctl" not in given and any(name.startswith("ref.") for name in given):
        options |= _kl(0.1, given)
    return options | weight_decay(0.01, given) | {"learner.optimizer.betas": [0.9, 0.999]}


def _trackers(value: Any, given: Given) -> Options:
    wanted = {
        "wandb": given.get("stats_logger.wandb.mode", "disabled") not in (None, "disabled"),
        "tensorboard": given.get("stats_logger.tensorboard.path") is not None,
    }
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    return {"telemetry.trackers": names} if names else {}


def _overlong(value: Any, given: Given) -> Options:
    if not value:
        return {}
    return {
        "algorithm.rewards.overlong_tokens": given.get("actor.overlong_tokens") or 0,
        "algorithm.rewards.overlong_penalty": given.get("actor.overlong_penalty_factor") or 1.0,
    }


def _kl(value: Any, given: Given) -> Options:
    """AReaL adds the divergence of each token to the rewards after their norm, and sums them to the end."""
    of_tokens: Options = {"algorithm.returns": "token"} if number(value) > 0 else {}
    return {"algorithm.kl.coefficient": value} | of_tokens


def _discount(value: Any, given: Given) -> Options:
    return {"algorithm.discount": value, "algorithm.returns": "token"} if number(value) < 1 else {}


def _decoupled(value: Any, given: Given) -> Options:
    """Without the decoupled loss, AReaL clips against recomputed logprobs if there are any, without a weight."""
    if value:
        return {"algorithm.loss.decoupled": True}
    if given.get("actor.recompute_logprob"):
        return {"algorithm.loss.decoupled": True, "algorithm.loss.behaviour_weight.rule": "ignore"}
    return {"algorithm.loss.decoupled": False}


def _weight_cap(value: Any, given: Given) -> Options:
    if not given.get("actor.use_decoupled_loss") or any(name.startswith("actor.rejection_sampling.") for name in given):
        return {}
    return {"actor": {"rejection_sampling": {"metric": "ratio", "upper": value}}}


def _other_loss(value: Any, given: Given) -> Options:
    if not value:
        return {}
    raise UnreadableError("a loss without a counterpart; docs/algorithms.md has ours")


def _train(value: Any, given: Given) -> Options:
    return {"data.train": source(value)}


def _eval(value: Any, given: Given) -> Options:
    return {"data.eval": source(value)}


def _lora(value: Any, given: Given) -> Options:
    if not value:
        return {}
    rank, alpha = given.get("actor.lora_rank", 32), given.get("actor.lora_alpha", 16)
    return adapters(rank, alpha, given.get("actor.target_modules"))


def _copied(value: Any, given: Given) -> Options:
    """Copy AReaL's own sections, which a config of ours takes as they are."""
    sections: Options = {}
    for name in ("adv_norm", "reward_norm", "rejection_sampling"):
        prefix = f"actor.{name}."
        section = {key.removeprefix(prefix): child for key, child in given.items() if key.startswith(prefix)}
        section.pop("group_size", None)
        if section:
            sections[name] = section
    return {"actor": sections}


def _slots(value: Any, given: Given) -> Options:
    """AReaL counts concurrent episodes of the whole fleet."""
    found = _ALLOCATION.fullmatch(str(given.get("allocation_mode", "")))
    backend = given.get("rollout.backend", "d1") if found is None else found["rollout"]
    num_workers = _degrees(backend)[1].get("d", 1)
    return {"rollout.num_slots": max(1, whole(value) * int(given.get("gconfig.n_samples", 1)) // num_workers)}


def _server(engine: str, value: Any, given: Given) -> Options:
    """Refuse an option of the server that is used."""
    if engine in str(given.get("rollout.backend", given.get("allocation_mode", ""))):
        raise UnreadableError(f"an option of the server; it may stand in rollout.{engine}.arguments")
    return {}


_SERVER = ("model", "model_path", "random_seed", "seed", "skip_tokenizer_init", "dtype", "max_model_len")
_BY_WORKER = absent("set by the worker that starts the server")

RULES: Mapping[str, Rule] = {
    "experiment_name": to("run.name", slug),
    "trial_name": absent("the folder of a run has the time in its name; run.folder names another"),
    "*.experiment_name": absent("as experiment_name"),
    "*.trial_name": absent("as trial_name"),
    "seed": to("run.seed"),
    "total_train_epochs": made(epochs),
    "total_train_steps": to("learner.num_train_steps"),
    "allocation_mode": made(_allocation),
    "cluster.n_nodes": to("launcher.num_hosts"),
    "cluster.n_gpus_per_node": to("launcher.gpus_per_host"),
    "cluster.fileroot": by_hand("the folder of a run is runs/NAME-TIME; run.folder names another"),
    "*.fileroot": absent("as cluster.fileroot"),
    "cluster.*": absent("the launcher finds processes without a name service"),
    "scheduler.*": absent("the launcher is a part of the command: areal-rloo run --launcher local, slurm or ray"),
    "actor.path": to("model.path"),
    "tokenizer_path": absent("the tokenizer is that of model.path"),
    "*.tokenizer_path": absent("the tokenizer is that of model.path"),
    "actor.dtype": to("model.dtype"),
    "actor.gradient_checkpointing": to("learner.gradient_checkpointing"),
    "actor.mb_spec.max_tokens_per_mb": to("learner.microbatch_tokens"),
    "actor.optimizer.type": choice({"adam": {}, "adamw": {}}, "AdamW"),
    "actor.optimizer.lr": to("learner.optimizer.learning_rate"),
    "actor.optimizer.weight_decay": made(weight_decay, "of all parameters, as in AReaL"),
    "actor.optimizer.beta1": made(
        lambda value, given: {"learner.optimizer.betas": [value, given.get("actor.optimizer.beta2", 0.999)]}
    ),
    "actor.optimizer.beta2": made(
        lambda value, given: {"learner.optimizer.betas": [given.get("actor.optimizer.beta1", 0.9), value]}
    ),
    "actor.optimizer.eps": to("learner.optimizer.eps"),
    "actor.optimizer.lr_scheduler_type": to("learner.optimizer.schedule"),
    "actor.optimizer.min_lr_ratio": to("learner.optimizer.final_share"),
    "actor.optimizer.gradient_clipping": to("learner.optimizer.max_grad_norm"),
    "actor.optimizer.warmup_steps_proportion": to("learner.optimizer.warmup_share", number),
    "actor.eps_clip": made(
        lambda value, given: {
            "algorithm.loss.eps_low": value,
            "algorithm.loss.eps_high": given.get("actor.eps_clip_higher") or value,
        }
    ),
    "actor.eps_clip_higher": absent("with eps_clip"),
    "actor.c_clip": to("algorithm.loss.dual_clip"),
    "actor.importance_sampling_level": choice(
        {
            "token": {"algorithm.loss.ratio_level": "token"},
            "sequence": {"algorithm.loss.ratio_level": "sequence_mean"},
        }
    ),
    "actor.reward_scaling": to("algorithm.rewards.scale"),
    "actor.reward_bias": to("algorithm.rewards.bias"),
    "actor.reward_clip": made(lambda value, given: {"algorithm.rewards.clip": [-value, value]}),
    "actor.overlong_reward_penalty": made(_overlong),
    "actor.overlong_*": absent("with overlong_reward_penalty"),
    "actor.mask_no_eos_with_zero": by_hand("sets rewards of truncated completions to 0; see algorithm.rewards"),
    "actor.kl_ctl": made(_kl, "of each token, in the return of the token"),
    "actor.kl_estimator": to("algorithm.kl.estimator"),
    "actor.discount": made(_discount),
    "actor.gae_lambda": choice({1: {}}, "1, because there is no critic", decides=True),
    "actor.ppo_n_minibatches": to("learner.num_minibatches"),
    "actor.recompute_logprob": absent("with use_decoupled_loss"),
    "actor.use_decoupled_loss": made(_decoupled),
    "actor.prox_logp_method": choice(
        {
            "recompute": {"algorithm.loss.proximal": "recompute"},
            "loglinear": {"algorithm.loss.proximal": "interpolate"},
        }
    ),
    **each("actor.behav_imp_weight_cap actor.behave_imp_weight_cap", made(_weight_cap, "masks tokens past the bound")),
    **each("actor.use_sapo_loss actor.use_cispo_loss actor.m2_threshold actor.use_lite_ppo", made(_other_loss)),
    **each("actor.sapo_*", by_hand("a loss without a counterpart")),
    "actor.reward_norm.group_size": absent("algorithm.group_size"),
    "actor.adv_norm.group_size": absent("algorithm.group_size"),
    "actor.adv_norm*": made(_copied, "AReaL's section is read as it is"),
    "actor.reward_norm*": made(_copied, "AReaL's section is read as it is"),
    "actor.rejection_sampling*": made(_copied, "AReaL's section is read as it is"),
    "actor.dynamic_sampling": made(lambda value, given: {"algorithm.min_reward_std": 1e-6} if value else {}),
    "actor.use_lora": made(_lora),
    "actor.lora_*": absent("with use_lora"),
    "actor.target_modules": absent("with use_lora"),
    "actor.peft_type": absent("LoRA"),
    "actor.max_new_tokens": absent("rollout.sampling.max_new_tokens"),
    "actor.group_size": absent("algorithm.group_size"),
    "actor.temperature": absent("rollout.sampling.temperature"),
    "actor.disable_dropout": DEFAULT,
    "actor.init_from_scratch": choice({False: {}}, "weights come from model.path"),
    "actor.scheduling_spec": absent("the launcher gives each process its cores and GPUs"),
    "actor.backend": made(_learner_backend, "ranks that shard weights, gradients and states"),
    **each("attn_impl pad_to_maximum mb_spec.* fsdp.* megatron.* archon.* weight_update_mode", SPEED, "actor."),
    **each("enable_tree_training use_kernels log_agent_stats* max_grad_norm_log version_* offload*", SPEED, "actor."),
    "ref.path": made(lambda value, given: {} if value == given.get("actor.path") else {"model.reference.path": value}),
    "ref.*": absent("the reference runs beside the policy, on the same ranks; loaded only if it is used"),
    "critic.*": CRITIC,
    "teacher.*": by_hand("distillation from a teacher has no counterpart"),
    "gconfig.n_samples": to("algorithm.group_size"),
    "gconfig.max_new_tokens": to("rollout.sampling.max_new_tokens"),
    "gconfig.min_new_tokens": to("rollout.sampling.min_new_tokens"),
    "gconfig.temperature": to("rollout.sampling.temperature"),
    "gconfig.top_p": to("rollout.sampling.top_p"),
    "gconfig.top_k": to("rollout.sampling.top_k", lambda value: 0 if value < 1 or value >= 10**6 else value),
    "gconfig.greedy": choice({False: {}}, "rollouts are sampled"),
    **each("gconfig.stop* gconfig.frequency_penalty gconfig.max_tokens", by_hand("no counterpart in rollout.sampling")),
    "eval_gconfig.*": by_hand("each set in data.eval has num_samples, temperature, top_p and top_k"),
    "rollout.backend": made(_rollout_backend),
    "rollout.max_head_offpolicyness": made(
        lambda value, given: {"algorithm.max_staleness": value, "algorithm.pipeline_depth": max(1, value)},
        "AReaL always generates as far ahead as the bound allows",
    ),
    "rollout.max_concurrent_rollouts": made(_slots, "completions of a server, instead of episodes of all"),
    "rollout.consumer_batch_size": absent("learner.groups_per_step"),
    **each(
        "queue_size scheduling_spec setup_timeout request_* pause_grace_period schedule_policy check_trajectory_format",
        absent("queues are bounded by algorithm.max_staleness"),
        "rollout.",
    ),
    **each("enable_rollout_tracing dump_to_file", absent("trajectories are always recorded"), "rollout."),
    **each("max_turns agent_run_args.* tir.*", by_hand("rollout.episode; see docs/agents.md")),
    "dynamic_bs": by_hand("algorithm.min_reward_std refills a batch"),
    "train_dataset.batch_size": to("learner.groups_per_step"),
    "train_dataset.path": made(_train),
    "train_dataset.max_length": made(
        lambda value, given: {"data.max_prompt_tokens": value, "data.overlong_prompts": "filter"}
    ),
    "train_dataset.shuffle": choice({True: {}}, "prompts are shuffled in every epoch"),
    "train_dataset.type": DEFAULT,
    **each("pin_memory num_workers drop_last", absent("prompts are read once, at the start"), "train_dataset."),
    "valid_dataset.path": made(_eval),
    "valid_dataset.*": absent("an evaluation has all prompts; data.eval.num_prompts limits them"),
    "sglang.context_length": absent("longest prompt and completion; rollout.sglang.arguments sets more"),
    "sglang.mem_fraction_static": to("rollout.sglang.arguments", lambda value: {"mem-fraction-static": value}),
    "sglang.max_running_requests": absent("rollout.num_slots"),
    **{f"{engine}.{name}": _BY_WORKER for engine in ("sglang", "vllm") for name in _SERVER},
    "sglang.*": made(partial(_server, "sglang")),
    "vllm.*": made(partial(_server, "vllm")),
    "saver.freq_epochs": _EPOCHS,
    "saver.freq_steps": to("checkpoint.every_n_steps", lambda value: value or 0),
    "recover.mode": absent("every run can be resumed: areal-rloo resume RUN_FOLDER"),
    "evaluator.freq_epochs": _EPOCHS,
    "evaluator.freq_steps": to("evaluation.every_n_versions", lambda value: value or 0),
    "saver.*": absent("checkpoint.every_n_steps"),
    "recover.*": absent("checkpoint.every_n_steps"),
    "evaluator.*": absent("evaluation.every_n_versions"),
    **each("wandb.mode tensorboard.path", made(_trackers), "stats_logger."),
    "stats_logger.*": TELEMETRY,
    "perf_tracer.*": absent("telemetry.trace=true records all work with times"),
    "enable_offload": to("learner.offload", lambda value: "parameters" if value else "none"),
    "async_training": absent("asynchronous unless algorithm.max_staleness is 0"),
    "weight_update_mode": absent("weights.transport"),
    "launcher.*": absent("the launcher gives each process its cores and GPUs"),
}
