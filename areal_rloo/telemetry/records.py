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
    """One train step. Seconds are of a monotonic clock.

    Entropy, ratio and behaviour_weight are over tokens with a gradient: within the staleness bound, and of trajectories
    whose advantage is not 0. Other shares are of trained tokens unless said otherwise.
    """

    num_train_steps: int  # steps done, this one included
    policy_version: int  # version published after this step
    wall_s: float  # since the learner was ready to train
    loss: float
    reward_mean: float
    reward_std: float
    zero_variance_group_share: float  # groups whose rewards are all equal
    advantage_abs_mean: float
    gradient_norm: float  # before clipping
    learning_rate: float
    entropy: float  # mean of -log p(token): an estimate from the sampled tokens
    ratio_mean: float  # current / proximal
    ratio_max: float
    ratio_clipped_share: float
    ratio_limited_share: float  # a log ratio beyond +-20
    behaviour_weight_mean: float  # proximal / behaviour, after its limit
    behaviour_weight_max: float  # before its limit
    behaviour_weight_limited_share: float
    reference_kl_k1: float  # of the behaviour policy to the reference, mean of completion tokens; 0 without a reference
    reference_kl_k3: float
    staleness_mean: float  # of trained tokens, in versions
    staleness_max: int
    staleness_tokens: dict[int, int]  # trained tokens by staleness
    masked_token_share: float  # of completion tokens: past the bound, so out of the loss
    completion_tokens_mean: float
    completion_tokens_max: int
    truncated_share: float  # of trajectories that ended at max_new_tokens
    trained_tokens: int  # completion tokens in the loss, in this step
    skipped_steps: int  # non-finite steps since the start
    failed_checkpoints: int  # that could not be written, since the start
    train_step_s: float
    wait_s: float  # before this step, for a batch
    learner_idle_s: float  # since the start
    rollout_idle_s: float  # since the first train step, mean over workers
    generated_tokens: int  # since the start
    generated_tokens_per_s: float  # since the previous record
    trained_tokens_per_s: float  # since the previous record
    num_workers: int  # alive
    ledger: LedgerCounts


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """One evaluation on the held-out split, sampled greedily."""

    policy_version: int  # the weights it measured (the lowest, where workers differed)
    policy_version_max: int
    accuracy: float  # mean reward
    num_prompts: int
    completion_tokens_mean: float
    wall_s: float


Record = TrainRecord | EvalRecord
