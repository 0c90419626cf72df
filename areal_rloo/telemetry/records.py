"""The lines of a run folder's metrics.jsonl: written by the learner, read by the progress line and the report."""

from __future__ import annotations

import msgspec


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Who owes what, in samples; always admitted = trained + dropped + buffered + in_flight."""

    admitted: int
    trained: int
    dropped: dict[str, int]  # by reason
    buffered: int
    in_flight: int

    @property
    def balanced(self) -> bool:
        return self.admitted == self.trained + sum(self.dropped.values()) + self.buffered + self.in_flight


class TrainRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="train"):
    """One train step. Seconds are of a monotonic clock. What could not be measured is NaN, in the file null.

    Fields from entropy to mismatch_max are over tokens with a gradient: in the loss, and of trajectories whose
    advantage is not 0 (`areal_rloo.algorithm.diagnostics` defines them). KLs are in nats a token.
    """

    num_train_steps: int  # steps done, this one included
    policy_version: int  # version published after this step
    wall_s: float  # since the learner was ready to train
    loss: float
    reward_mean: float
    reward_std: float
    reward_lower_decile: float
    reward_median: float
    reward_upper_decile: float
    reward_parts: dict[str, float]  # mean of each part before its weight, by label
    reward_by_source: dict[str, float]  # mean by data source
    num_limited_rewards: int  # beyond what can be computed with
    zero_variance_group_share: float  # groups whose rewards are all equal
    advantage_mean: float  # of tokens in the loss, as the next four
    advantage_std: float
    advantage_min: float
    advantage_max: float
    advantage_abs_mean: float
    gradient_norm: float  # before clipping
    learning_rate: float
    entropy: float  # of the current policy, over the whole vocabulary
    ratio_mean: float  # current / proximal
    ratio_max: float
    ratio_clipped_share: float
    ratio_limited_share: float  # a log ratio or log behaviour_weight beyond +-20
    behaviour_weight_mean: float  # proximal / behaviour, as the loss used it
    behaviour_weight_max: float  # before its rule
    behaviour_weight_clamped_share: float
    behaviour_weight_masked_share: float
    effective_sample_share: float
    behaviour_kl_k1: float  # of the behaviour policy to the current one
    behaviour_kl_k3: float
    behaviour_kl_by_staleness: dict[int, float]  # by k3
    proximal_kl_k1: float
    proximal_kl_k3: float
    mismatch_abs_mean: float  # |log behaviour - log proximal| of tokens without staleness
    mismatch_max: float
    kl_coefficient: float
    reference_kl_k1: float  # of the behaviour policy to the reference, mean of completion tokens
    reference_kl_k3: float
    staleness_mean: float  # of trained tokens, in versions
    staleness_max: int
    staleness_tokens: dict[int, int]  # trained tokens by staleness
    masked_token_share: float  # of completion tokens: past the bound, so out of the loss
    truncated_token_share: float  # of completion tokens: out of the loss for the truncation of their trajectory
    completion_tokens_mean: float
    completion_tokens_max: int
    truncated_share: float  # of trajectories that ended at max_new_tokens
    spanning_share: float  # of trajectories whose tokens several policy versions sampled
    trained_tokens: int  # completion tokens in the loss, in this step
    skipped_steps: int  # non-finite steps since the start
    failed_checkpoints: int  # that could not be written, since the start
    train_step_s: float
    times_s: dict[str, float]  # of this step and what comes after it: docs/learner.md has the parts
    learner_tokens_per_s: float  # forward and backward, prompts among them, while it trained
    model_flops_share: float  # MFU: of what the devices could do meanwhile; NaN where that is not known
    wait_s: float  # before this step, for a batch
    learner_idle_s: float  # since the start
    rollout_idle_s: float  # since the first train step, mean over workers
    generated_tokens: int  # since the start
    generated_tokens_per_s: float  # since the previous record
    trained_tokens_per_s: float  # since the previous record
    num_workers: int  # alive
    filtered_prompts: int  # left out for their length, since the start
    truncated_prompts: int  # cut to their end, since this process began, evaluation included
    ledger: LedgerCounts


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """One evaluation on a held-out set."""

    name: str  # of the set
    policy_version: int  # the weights it measured (the lowest, where workers differed)
    policy_version_max: int
    accuracy: float  # mean reward
    num_prompts: int
    num_samples: int  # of each prompt
    pass_share: float  # pass@k of k = num_samples; NaN with one sample
    majority_share: float  # maj@k; NaN with one sample, or where the task knows no final answers
    completion_tokens_mean: float
    wall_s: float


Record = TrainRecord | EvalRecord
