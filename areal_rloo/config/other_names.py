"""Names of options in AReaL, verl, TRL and ms-swift, for the hint of an unknown key. `areal-rloo migrate` has more."""

from __future__ import annotations

from collections.abc import Mapping

OURS: Mapping[str, str] = {
    **dict.fromkeys(("lr", "actor_lr"), "learner.optimizer.learning_rate"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "learner.optimizer.schedule"),
    "lr_warmup_steps": "learner.optimizer.warmup_steps",
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_steps_ratio", "warmup_steps_proportion"), "learner.optimizer.warmup_share"
    ),
    **dict.fromkeys(("gradient_clipping", "grad_clip"), "learner.optimizer.max_grad_norm"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "learner.optimizer.betas"),
    **dict.fromkeys(("n", "n_samples", "num_generations", "rloo_k", "rollout_n"), "algorithm.group_size"),
    **dict.fromkeys(("max_head_offpolicyness", "staleness_threshold"), "algorithm.max_staleness"),
    **dict.fromkeys(("kl_ctl", "kl_coef", "kl_loss_coef", "beta"), "algorithm.kl.coefficient"),
    **dict.fromkeys(("eps_clip", "clip_ratio", "clip_ratio_low", "epsilon"), "algorithm.loss.eps_low"),
    **dict.fromkeys(("eps_clip_higher", "clip_ratio_high", "epsilon_high"), "algorithm.loss.eps_high"),
    **dict.fromkeys(("c_clip", "clip_ratio_c", "delta"), "algorithm.loss.dual_clip"),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), "algorithm.loss.aggregation"),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), "algorithm.loss.entropy_coefficient"),
    "gamma": "algorithm.discount",
    "adv_estimator": "algorithm.preset",
    "reward_scaling": "algorithm.rewards.scale",
    "reward_bias": "algorithm.rewards.bias",
    **dict.fromkeys(("train_batch_size", "generation_batch_size"), "learner.groups_per_step"),
    **dict.fromkeys(("ppo_n_minibatches", "ppo_mini_batch_size", "num_mini_batches"), "learner.num_minibatches"),
    **dict.fromkeys(
        ("max_tokens_per_mb", "ppo_max_token_len_per_gpu", "per_device_train_batch_size", "micro_batch_size"),
        "learner.microbatch_tokens",
    ),
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs", "num_iterations"), "learner.num_epochs_per_batch"),
    **dict.fromkeys(("total_train_steps", "total_training_steps", "max_steps"), "learner.num_train_steps"),
    **dict.fromkeys(("total_train_epochs", "total_epochs", "num_train_epochs"), "data.num_epochs"),
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "response_length"), "rollout.sampling.max_new_tokens"
    ),
    **dict.fromkeys(("max_prompt_length", "max_length"), "data.max_prompt_tokens"),
    **dict.fromkeys(("tensor_model_parallel_size", "vllm_tensor_parallel_size", "tp_size"), "rollout.tensor_parallel"),
    **dict.fromkeys(("model_name_or_path", "model_path"), "model.path"),
    **dict.fromkeys(("save_steps", "save_freq"), "checkpoint.every_n_steps"),
    **dict.fromkeys(("eval_steps", "test_freq"), "evaluation.every_n_versions"),
    "save_total_limit": "checkpoint.keep",
    **dict.fromkeys(("report_to", "logger"), "telemetry.trackers"),
    **dict.fromkeys(("n_gpus_per_node", "nproc_per_node"), "launcher.gpus_per_host"),
    **dict.fromkeys(("nnodes", "n_nodes"), "launcher.num_hosts"),
}
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("critic", "gae_lambda", "lam", "vf_coef", "critic_warmup"), "there is no critic"),
    **dict.fromkeys(
        (
            *("gconfig", "actor", "actor_rollout_ref", "trainer", "train_dataset", "valid_dataset", "cluster"),
            *("allocation_mode", "experiment_name"),
        ),
        "a key of AReaL or verl; `areal-rloo migrate FILE` translates a file",
    ),
    "gradient_accumulation_steps": "microbatches of learner.microbatch_tokens add up to a minibatch",
}
