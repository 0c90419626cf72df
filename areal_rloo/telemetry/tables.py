"""Every metric of the system: its name and its definition, by the field it is read from.

Dashboards and alert rules may name only what stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "areal_rloo_"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of a table: its name without the prefix, and its definition. A name that ends in `_total` only grows.

    `keeps` is for what not every step can measure: NaN leaves it at what was measured last.
    """

    name: str
    text: str
    label: str | None = None
    keeps: bool = False

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        return "counter" if self.name.endswith("_total") else "gauge"


# By field of TrainRecord.
TRAIN = {
    "num_train_steps": Metric("train_steps_total", "Train steps done"),
    "skipped_steps": Metric("skipped_steps_total", "Optimizer steps skipped because something was not finite"),
    "failed_checkpoints": Metric("failed_checkpoints_total", "Checkpoints that could not be written"),
    "filtered_prompts": Metric("filtered_prompts_total", "Prompts left out for their length"),
    "truncated_prompts": Metric("truncated_prompts_total", "Prompts cut to their end for their length"),
    "policy_version": Metric("policy_version", "Version of the weights published last"),
    "num_workers": Metric("rollout_workers", "Rollout workers alive"),
    "loss": Metric("loss", "Loss of the last train step"),
    "reward_mean": Metric("reward_mean", "Mean reward of the last batch"),
    "reward_std": Metric("reward_std", "Standard deviation of the rewards of the last batch"),
    "zero_variance_group_share": Metric("zero_variance_group_share", "Share of groups whose rewards are all equal"),
    "reward_lower_decile": Metric("reward_lower_decile", "Reward that a tenth of the last batch is at or below"),
    "reward_median": Metric("reward_median", "Median reward of the last batch"),
    "reward_upper_decile": Metric("reward_upper_decile", "Reward that a tenth of the last batch is at or above"),
    "num_limited_rewards": Metric("limited_rewards", "Shaped rewards of the last batch beyond 1e12, set to that"),
    "advantage_mean": Metric("advantage_mean", "Mean advantage of tokens in the loss"),
    "advantage_std": Metric("advantage_std", "Standard deviation of the advantage of tokens in the loss"),
    "advantage_min": Metric("advantage_min", "Smallest advantage of a token in the loss"),
    "advantage_max": Metric("advantage_max", "Largest advantage of a token in the loss"),
    "advantage_abs_mean": Metric("advantage_abs_mean", "Mean absolute advantage of tokens in the loss"),
    "gradient_norm": Metric("gradient_norm", "Gradient norm before clipping, the largest of the step's minibatches"),
    "learning_rate": Metric("learning_rate", "Learning rate of the last train step"),
    "entropy": Metric("entropy", "Mean entropy of the policy, in nats, where it sampled tokens with a gradient"),
    "ratio_mean": Metric("ratio_mean", "Mean of current / proximal over tokens with a gradient"),
    "ratio_max": Metric("ratio_max", "Largest current / proximal of the last step"),
    "ratio_limited_share": Metric(
        "ratio_limited_share", "Share of tokens with a gradient and a log ratio or log behaviour_weight beyond 20"
    ),
    "ratio_clipped_share": Metric("ratio_clipped_share", "Share of tokens with a gradient whose ratio was clipped"),
    "behaviour_weight_mean": Metric("behaviour_weight_mean", "Mean of proximal / behaviour, after its limit"),
    "behaviour_weight_max": Metric("behaviour_weight_max", "Largest proximal / behaviour, before its limit"),
    "behaviour_weight_clamped_share": Metric(
        "behaviour_weight_clamped_share", "Share of tokens with a gradient whose behaviour_weight was set to a bound"
    ),
    "behaviour_weight_masked_share": Metric(
        "behaviour_weight_masked_share", "Share of tokens with a gradient that their behaviour_weight took out"
    ),
    "effective_sample_share": Metric(
        "effective_sample_share", "(sum w)^2 / (n sum w^2) of the behaviour_weights w of n tokens with a gradient"
    ),
    "behaviour_kl_k1": Metric(
        "behaviour_kl_signed", "KL of behaviour to current by k1, mean of tokens with a gradient"
    ),
    "behaviour_kl_k3": Metric(
        "behaviour_kl_nonnegative", "KL of behaviour to current by k3, mean of tokens with a gradient"
    ),
    "proximal_kl_k1": Metric("proximal_kl_signed", "KL of proximal to current by k1, mean of tokens with a gradient"),
    "proximal_kl_k3": Metric(
        "proximal_kl_nonnegative", "KL of proximal to current by k3, mean of tokens with a gradient"
    ),
    "mismatch_abs_mean": Metric(
        "mismatch_mean",
        "Train-inference mismatch: mean |log behaviour - log proximal| of tokens of one version on both "
        "sides, when there were such tokens last",
        keeps=True,
    ),
    "mismatch_max": Metric(
        "mismatch_max", "Largest |log behaviour - log proximal| of such a token, when there were any last", keeps=True
    ),
    "kl_coefficient": Metric("kl_coefficient", "Coefficient of the KL to the reference in the last step"),
    "reference_kl_k1": Metric("reference_kl_signed", "KL of behaviour to reference by k1, mean of completion tokens"),
    "reference_kl_k3": Metric(
        "reference_kl_nonnegative", "KL of behaviour to reference by k3, mean of completion tokens"
    ),
    "staleness_mean": Metric("staleness_mean_versions", "Mean staleness of trained tokens of the last step"),
    "staleness_max": Metric("staleness_max_versions", "Largest staleness of a trained token of the last step"),
    "masked_token_share": Metric("masked_token_share", "Share of completion tokens past the bound, out of the loss"),
    "truncated_token_share": Metric(
        "truncated_token_share", "Share of completion tokens out of the loss because their trajectory was truncated"
    ),
    "completion_tokens_mean": Metric("completion_tokens_mean", "Mean completion length of the last batch, in tokens"),
    "completion_tokens_max": Metric("completion_tokens_max", "Longest completion of the last batch, in tokens"),
    "truncated_share": Metric("truncated_share", "Share of trajectories that ended at the token limit"),
    "spanning_share": Metric("spanning_share", "Share of trajectories whose tokens several policy versions sampled"),
    "train_step_s": Metric("train_step_seconds", "Seconds of the last train step, without the wait for its batch"),
    "learner_tokens_per_s": Metric(
        "learner_tokens_per_second", "Tokens forward and backward per second of the last train step, prompts included"
    ),
    "model_flops_share": Metric(
        "model_flops_share", "MFU: arithmetic of the last train step, by what the devices could have done in its time"
    ),
    "learner_idle_s": Metric("learner_idle_seconds_total", "Seconds the learner waited for a batch"),
    "rollout_idle_s": Metric(
        "rollout_idle_seconds_total", "Seconds a worker had nothing to generate since the first step, mean over workers"
    ),
    "generated_tokens": Metric("generated_tokens_total", "Completion tokens generated by all workers"),
    "generated_tokens_per_s": Metric("generated_tokens_per_second", "Tokens generated per second in the last step"),
    "trained_tokens_per_s": Metric("trained_tokens_per_second", "Tokens trained on per second in the last step"),
}
BEHAVIOUR_KL = Metric(
    "behaviour_kl_by_staleness", "KL of behaviour to current by k3, mean by staleness in versions", "staleness"
)
TRAINED_TOKENS = Metric("trained_tokens_total", "Completion tokens trained on, by staleness in versions", "staleness")

STEP_PART = Metric("train_step_part_seconds", "Seconds of a part of the last train step, of the slowest rank", "part")
REWARD_PART = Metric("reward_part_mean", "Mean of a part of the reward in the batch, before its weight", "part")
SOURCE_REWARD = Metric("source_reward_mean", "Mean reward of the batch's samples, by data source", "source")

# By field of EvalRecord, each by held-out set.
EVALUATION = {
    "accuracy": Metric("evaluation_accuracy", "Mean reward on a held-out set", "set"),
    "pass_share": Metric("evaluation_pass_share", "Share of prompts with a right sample (pass@k)", "set"),
    "majority_share": Metric("evaluation_majority_share", "Share whose most frequent answer is right (maj@k)", "set"),
    "policy_version": Metric("evaluation_policy_version", "Version that the last evaluation measured", "set"),
    "completion_tokens_mean": Metric("evaluation_completion_tokens_mean", "Mean completion length, in tokens", "set"),
}

LEDGER_STATES = ("admitted", "trained", "buffered", "in_flight")
LEDGER = Metric("ledger_samples", f"Samples by state: {', '.join(LEDGER_STATES)}", "state")
DROPPED = Metric("ledger_dropped_samples_total", "Samples dropped from the ledger, by reason", "reason")
UNBALANCED = Metric("ledger_imbalance_samples", "Samples admitted and not accounted for; anything but 0 is a bug")

# By key of `RolloutMetrics.update`.
ROLLOUT = {
    "policy_version": Metric("rollout_policy_version", "Version of the weights this worker's engine runs"),
    "num_running": Metric("rollout_running_completions", "Completions being decoded"),
    "num_waiting": Metric("rollout_waiting_requests", "Requests waiting for a slot or a version"),
    "unacknowledged": Metric("rollout_unacknowledged_trajectories", "Trajectories sent and not acknowledged yet"),
    "generated_tokens": Metric("rollout_generated_tokens_total", "Completion tokens this worker generated"),
    "prefill_tokens": Metric("rollout_prefill_tokens_total", "Prompt tokens this worker computed"),
    "cached_tokens": Metric("rollout_cached_prompt_tokens_total", "Prompt tokens that had been computed before"),
    "num_preempted": Metric("rollout_preemptions_total", "Completions put off for want of cache, and computed again"),
    "weight_updates": Metric("rollout_weight_updates_total", "Versions this worker took"),
    "idle_s": Metric("rollout_worker_idle_seconds_total", "Seconds this worker had nothing to generate"),
    "swap_s": Metric("rollout_swap_seconds_total", "Seconds decoding stood still to take weights"),
    "scored": Metric("rollout_rewards_total", "Completions this worker scored"),
    "reward_restarts": Metric("rollout_reward_restarts_total", "Reward processes this worker had to replace"),
    "reward_busy_s": Metric("rollout_reward_busy_seconds_total", "Seconds of scoring, summed over what ran at a time"),
}
ROLLOUT_DROPPED = Metric("rollout_dropped_completions_total", "Completions this worker dropped, by reason", "reason")

# By field of the SGLangStatistics of a worker whose engine is a server; the server's own metrics stand beside them.
ENGINE_SERVER = {
    "restarts": Metric(
        "engine_server_restarts_total", "Times this worker's server failed and was started or found again"
    ),
    "health_failures": Metric("engine_server_health_failures_total", "Times it did not answer in time that it is well"),
    "resumed": Metric("engine_server_resumed_requests_total", "Requests that came back unfinished and were sent again"),
    "retractions": Metric("engine_server_retractions_total", "Requests the server put off for want of cache"),
    "weights_lost": Metric("engine_server_weights_lost_total", "Times it was found with earlier or unknown weights"),
    "last_pause_s": Metric("engine_server_last_pause_seconds", "Seconds that the last update of its weights paused it"),
}

# By field of the wire's ChannelStatistics; either end has them.
WIRE = {
    "messages_in": Metric("wire_received_messages_total", "Messages received"),
    "messages_out": Metric("wire_sent_messages_total", "Messages sent"),
    "bytes_in": Metric("wire_received_bytes_total", "Bytes received"),
    "bytes_out": Metric("wire_sent_bytes_total", "Bytes sent"),
    "refused": Metric("wire_refused_messages_total", "Messages that could not be read or were not allowed"),
    "unroutable": Metric("wire_unroutable_messages_total", "Messages whose peer was gone"),
    "resent": Metric("wire_resent_messages_total", "Batches of trajectories sent again for want of an ack"),
}

# By field of the weights' BroadcastStatistics (learner) and ReceiveStatistics (worker).
BROADCAST = {
    "broadcasts": Metric("weights_broadcasts_total", "Broadcasts of weights begun"),
    "failures": Metric("weights_failures_total", "Versions that a worker said it could not take"),
    "left_out": Metric("weights_left_out_total", "Times a worker was left out of a broadcast for not answering"),
    "broadcast_s": Metric("weights_broadcast_seconds_total", "Seconds spent broadcasting"),
    "last_broadcast_s": Metric("weights_last_broadcast_seconds", "Seconds that the last broadcast took"),
    "sent_bytes": Metric("weights_sent_bytes_total", "Bytes of weights sent"),
}
RECEIVE = {
    "received": Metric("weights_received_total", "Versions this worker received"),
    "failed": Metric("weights_receive_failures_total", "Versions that did not arrive whole at this worker"),
    "received_bytes": Metric("weights_received_bytes_total", "Bytes of weights this worker received"),
}

Table = Mapping[str, Metric]


def all_metrics() -> Iterator[Metric]:
    """Every row of every table."""
    for table in (TRAIN, EVALUATION, ROLLOUT, ENGINE_SERVER, WIRE, BROADCAST, RECEIVE):
        yield from table.values()
    yield from (
        TRAINED_TOKENS,
        BEHAVIOUR_KL,
        STEP_PART,
        REWARD_PART,
        SOURCE_REWARD,
        LEDGER,
        DROPPED,
        UNBALANCED,
        ROLLOUT_DROPPED,
    )


def metric_names() -> Iterator[str]:
    """Every metric name, as a dashboard or an alert rule writes it."""
    return (PREFIX + metric.name for metric in all_metrics())
