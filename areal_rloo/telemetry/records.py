"""Define the lines of a run folder's metrics.jsonl, and every number in them.

The learner writes records; the progress line, the report and the launcher read them. A new number of a train step is
named in two places: its declaration in `TrainRecord`, and the code that computes it. /metrics, the report and
docs/metrics.md follow from the declaration.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from areal_rloo.telemetry.metric import Chart, Label, Metric

_PARTS = Chart("Parts of the reward, before their weights")
_SOURCES = Chart("Reward by data source")
_STALENESS = Chart("Staleness of trained tokens, in versions")
_PAST = Chart("Tokens past the bound, out of the loss (share)")
_LENGTH = Chart("Completion length, in tokens")
_SPEED = Chart("Tokens per second")
_SHARES = Chart("Shares of groups and completions", whole=True)
_RATIO = Chart("Ratio rho, which the clip limits")
_WEIGHT = Chart("behaviour_weight: proximal / behaviour")
_LIMITED = Chart("Share of tokens clipped or limited")
_KL = Chart("KL in nats a token (k3)")
_GAP = Chart("Train-inference mismatch: |log behaviour - log proximal| at equal version")
_SAMPLE_SIZE = Chart("Effective sample size, as a share", whole=True)
_ENTROPY = Chart("Entropy of the policy, in nats")
_NORM = Chart("Gradient norm, before clipping")
_LOSS = Chart("Loss")
_TIMES = Chart("Seconds of a step, by what it does")
_PASSES = Chart("Tokens forward and backward per second of training")
_MFU = Chart("Model FLOPs utilization (MFU)")
_IDLE = Chart("Idle seconds since the start")
_WAITS = Chart("Share of the time that a half waits for the other", whole=True)
_ALIKE = 1e-6
_ACCURACY = Chart("Held-out accuracy by policy version")
_REWARD = Chart("Held-out reward by policy version")
_PASS = Chart("Prompts with a right sample: pass@k", whole=True)
_MAJORITY = Chart("Prompts whose majority is right: maj@k", whole=True)
DROP_REASONS = (
    *("stale", "max_attempts", "group_too_small", "too_long", "non_finite", "options_changed"),
    *("low_reward_std", "group_filter", "group_filter_error"),
    *("episode_error", "episode_timeout", "context_full", "agent_timeout", "tool_failed", "tool_timeout"),
    *("generation_failed", "wrong_tokens"),
    *("reward_timeout", "reward_crash", "reward_error", "reward_out_of_range", "reward_wrong_type"),
    "reward_unavailable",
)
_RARE = (0, 0.05)  # a healthy share, or mean distance


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where all samples are; always admitted = trained + dropped + buffered + in_flight."""

    admitted: Annotated[int, Metric("Samples admitted", "samples", "counter")]
    trained: Annotated[int, Metric("Samples trained on", "samples", "counter")]
    dropped: Annotated[
        dict[str, int], Metric("Samples dropped, by reason", "samples", "counter", label="reason", starts=DROP_REASONS)
    ]
    dropped_tokens: Annotated[
        dict[str, int],
        Metric(
            "The policy's tokens in dropped samples, as far as known, by reason",
            *("tokens", "counter"),
            label="reason",
            starts=DROP_REASONS,
        ),
    ]
    buffered: Annotated[int, Metric("Samples that wait in the buffer", "samples")]
    in_flight: Annotated[int, Metric("Samples leased and not finished", "samples")]

    @property
    def imbalance(self) -> Annotated[int, Metric("Samples admitted and lost: a bug", "samples", healthy=(0, 0))]:
        """Samples that were admitted and are nowhere."""
        return self.admitted - self.trained - sum(self.dropped.values()) - self.buffered - self.in_flight

    @property
    def balanced(self) -> bool:
        return self.imbalance == 0


class TrainRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="train"):
    """One train step. Seconds are of a monotonic clock. A number that could not be measured is NaN, null in the file.

    Numbers of ratios, weights, mismatch, entropy and the KLs to the current policy are over tokens with a gradient: in
    the loss, and of trajectories whose advantage is not 0. KLs are in nats a token.
    """

    metrics_prefix: ClassVar[str] = ""

    num_train_steps: Annotated[int, Metric("Train steps done, this step included", kind="counter")]
    policy_version: Annotated[int, Metric("Version of the weights published after this step", "versions")]
    wall_s: Annotated[float, Metric("Time since the learner was ready to train", "s", "counter")]
    reward_mean: Annotated[float, Metric("Mean reward of the batch")]
    reward_std: Annotated[float, Metric("Standard deviation of the rewards of the batch")]
    reward_lower_decile: Annotated[float, Metric("A tenth of the rewards of the batch is at or below")]
    reward_median: Annotated[float, Metric("Median reward of the batch")]
    reward_upper_decile: Annotated[float, Metric("A tenth of the rewards of the batch is at or above")]
    reward_parts: Annotated[dict[str, float], Metric("Mean of each part before its weight", label="part", chart=_PARTS)]
    reward_by_source: Annotated[dict[str, float], Metric("Mean reward by data source", label="source", chart=_SOURCES)]
    num_limited_rewards: Annotated[int, Metric("Shaped rewards of the batch beyond 1e12, set to that limit", "samples")]
    staleness_mean: Annotated[float, Metric("Mean staleness of trained tokens", "versions", chart=_STALENESS)]
    staleness_max: Annotated[int, Metric("Largest staleness of a trained token", "versions", chart=_STALENESS)]
    staleness_tokens: Annotated[dict[int, int], Metric("Trained tokens by staleness", "tokens", "sum", "staleness")]
    masked_token_share: Annotated[float, Metric("Tokens past max_staleness", "share", healthy=(0, 0.1), chart=_PAST)]
    truncated_token_share: Annotated[float, Metric("Completion tokens masked with their truncated trajectory", "share")]
    completion_tokens_mean: Annotated[float, Metric("Mean completion length of the batch", "tokens", chart=_LENGTH)]
    completion_tokens_max: Annotated[int, Metric("Longest completion of the batch", "tokens", chart=_LENGTH)]
    completion_tokens_std: Annotated[float, Metric("Standard deviation of the completion lengths", "tokens")]
    longest_of_group_mean: Annotated[float, Metric("Longest completion of a group, mean of groups", "tokens")]
    generated_tokens: Annotated[int, Metric("Completion tokens generated by all workers", "tokens", "counter")]
    generated_tokens_per_s: Annotated[float, Metric("Generated since the last record", "tokens/s", chart=_SPEED)]
    trained_tokens: Annotated[int, Metric("Completion tokens in the loss of this step", "tokens", "sum")]
    trained_tokens_per_s: Annotated[float, Metric("Trained on since the last record", "tokens/s", chart=_SPEED)]
    zero_variance_group_share: Annotated[
        float, Metric("Groups whose rewards are all equal", "share", healthy=(0, 0.8), chart=_SHARES)
    ]
    truncated_share: Annotated[
        float, Metric("Trajectories ended by the token limit", "share", chart=_SHARES, curve="truncated completions")
    ]
    spanning_share: Annotated[float, Metric("Trajectories of several policy versions", "share", chart=_SHARES)]
    advantage_mean: Annotated[float, Metric("Mean advantage of tokens in the loss")]
    advantage_std: Annotated[float, Metric("Standard deviation of the advantage of tokens in the loss")]
    advantage_min: Annotated[float, Metric("Smallest advantage of a token in the loss")]
    advantage_max: Annotated[float, Metric("Largest advantage of a token in the loss")]
    advantage_abs_mean: Annotated[float, Metric("Mean absolute advantage of tokens in the loss")]
    ratio_mean: Annotated[float, Metric("Mean of rho, the ratio that the clip limits", chart=_RATIO)]
    ratio_max: Annotated[float, Metric("Largest rho", chart=_RATIO)]
    behaviour_weight_mean: Annotated[float, Metric("Mean of proximal / behaviour, after its rule", chart=_WEIGHT)]
    behaviour_weight_max: Annotated[float, Metric("Largest proximal / behaviour, before its rule", chart=_WEIGHT)]
    ratio_clipped_share: Annotated[float, Metric("Tokens whose loss the clip decided", "share", chart=_LIMITED)]
    ratio_limited_share: Annotated[float, Metric("Tokens with a log rho or log w in the loss beyond +-20", "share")]
    behaviour_weight_clamped_share: Annotated[
        float, Metric("behaviour_weights set to their bound", "share", healthy=_RARE, keeps=True, chart=_LIMITED)
    ]
    behaviour_weight_masked_share: Annotated[
        float, Metric("Tokens that their behaviour_weight masked", "share", healthy=_RARE, keeps=True, chart=_LIMITED)
    ]
    behaviour_kl_k1: Annotated[float, Metric("KL(behaviour, current) by k1, mean of tokens", "nats")]
    behaviour_kl_k3: Annotated[
        float, Metric("KL(behaviour, current) by k3, mean of tokens", "nats", healthy=(0, 0.5), keeps=True, chart=_KL)
    ]
    behaviour_kl_by_staleness: Annotated[
        dict[int, float], Metric("KL(behaviour, current) by k3, by staleness", "nats", label="staleness", fades=True)
    ]
    proximal_kl_k1: Annotated[float, Metric("KL(proximal, current) by k1, mean of tokens", "nats")]
    proximal_kl_k3: Annotated[float, Metric("KL(proximal, current) by k3, mean of tokens", "nats", chart=_KL)]
    kl_coefficient: Annotated[float, Metric("Coefficient of the KL to the reference in this step")]
    reference_kl_k1: Annotated[float, Metric("KL(behaviour, reference) by k1, of completion tokens", "nats")]
    reference_kl_k3: Annotated[float, Metric("KL(behaviour, reference) by k3, of completion tokens", "nats", chart=_KL)]
    mismatch_abs_mean: Annotated[
        float,
        Metric("Mean |log behaviour - log proximal| at staleness 0", "nats", healthy=_RARE, keeps=True, chart=_GAP),
    ]
    mismatch_max: Annotated[
        float, Metric("Largest |log behaviour - log proximal| of these tokens", "nats", keeps=True, chart=_GAP)
    ]
    lora_lost_share: Annotated[
        float, Metric("Change by adapters that rounding takes from a server's merged weights", "share")
    ]
    effective_sample_share: Annotated[
        float, Metric("(sum u)^2 / (n sum u^2) of the n ratios u = current / behaviour", "share", chart=_SAMPLE_SIZE)
    ]
    entropy: Annotated[float, Metric("Mean entropy of the policy, over the vocabulary", "nats", chart=_ENTROPY)]
    gradient_norm: Annotated[float, Metric("Norm before clipping, the largest minibatch's", chart=_NORM)]
    learning_rate: Annotated[float, Metric("Learning rate at the beginning of the step")]
    loss: Annotated[float, Metric("Loss, mean of the step's minibatches", chart=_LOSS)]
    skipped_steps: Annotated[int, Metric("Optimizer steps skipped: not finite", kind="counter", healthy=(0, 0))]
    failed_checkpoints: Annotated[int, Metric("Checkpoints that could not be written", kind="counter", healthy=(0, 0))]
    train_step_s: Annotated[float, Metric("Time of the train step, without the wait for its batch", "s")]
    times_s: Annotated[dict[str, float], Metric("Time of a part, of the slowest rank", "s", label="part", chart=_TIMES)]
    learner_tokens_per_s: Annotated[float, Metric("Forward and backward, prompts included", "tokens/s", chart=_PASSES)]
    model_flops_share: Annotated[float, Metric("MFU: arithmetic as a share of the devices' peak", "share", chart=_MFU)]
    wait_s: Annotated[float, Metric("Time the learner waited for the batch of this step", "s")]
    learner_idle_s: Annotated[float, Metric("Time the learner waited for batches", "s", "counter", chart=_IDLE)]
    rollout_idle_s: Annotated[
        float, Metric("Time without generation since the first step, mean of workers", "s", "counter", chart=_IDLE)
    ]
    idle_share: Annotated[
        dict[str, float],
        Metric("Time since the last record in which a half waited for the other", "share", label="half", chart=_WAITS),
    ]
    rollout_busy_s: Annotated[float, Metric("Time with a completion being decoded, all workers", "s", "counter")]
    decoding_s: Annotated[float, Metric("Time in decoding, summed over completions", "s", "counter")]
    num_workers: Annotated[int, Metric("Rollout workers alive at the end of the step")]
    weights_behind: Annotated[int, Metric("Most versions that a worker has missed since its start", "versions")]
    epoch: Annotated[float, Metric("Passes through the train prompts, by prompts leased so far")]
    filtered_prompts: Annotated[int, Metric("Prompts left out because of their length", kind="counter")]
    truncated_prompts: Annotated[int, Metric("Prompts cut to their end since the learner started")]
    ledger: LedgerCounts


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """One evaluation on a held-out set. If workers measured several versions, both the lowest and the highest count."""

    metrics_prefix: ClassVar[str] = "evaluation_"

    name: Annotated[str, Label("set")]
    policy_version: Annotated[int, Metric("Lowest version of the weights that was measured", "versions")]
    policy_version_max: Annotated[int, Metric("Highest version of the weights that was measured", "versions")]
    accuracy: Annotated[
        float, Metric("Right samples, with a reward of 1; NaN if a reward is not from 0 to 1", "share", chart=_ACCURACY)
    ]
    accuracy_error: Annotated[float, Metric("Standard error of the accuracy over the prompts", "share")]
    reward: Annotated[float, Metric("Mean reward on a held-out set", chart=_REWARD)]
    reward_error: Annotated[float, Metric("Standard error of the reward over the prompts")]
    num_prompts: Annotated[int, Metric("Prompts of the held-out set")]
    num_samples: Annotated[int, Metric("Samples of each prompt", "samples")]
    num_failed: Annotated[int, Metric("Samples without a reward, counted as wrong", "samples", healthy=(0, 0))]
    pass_share: Annotated[float, Metric("Prompts with a right sample: pass@k", "share", chart=_PASS)]
    majority_share: Annotated[float, Metric("Prompts whose majority answer is right: maj@k", "share", chart=_MAJORITY)]
    completion_tokens_mean: Annotated[float, Metric("Mean completion length", "tokens")]
    wall_s: Annotated[float, Metric("Time of the evaluation", "s")]

    @property
    def result(self) -> tuple[str, float]:
        """The quality of the policy, with the name of the number: the accuracy if each reward was 0 or 1."""
        is_share = abs(self.accuracy - self.reward) < _ALIKE
        return ("accuracy", self.accuracy) if is_share else ("reward", self.reward)


Record = TrainRecord | EvalRecord
