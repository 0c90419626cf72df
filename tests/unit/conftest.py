"""Records as the learner writes them."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, TrainRecord
from areal_rloo.telemetry.trajectories import TrajectoryRecord

MakeTrainRecord = Callable[..., TrainRecord]
MakeTrajectory = Callable[..., TrajectoryRecord]


STEP_NUMBERS: dict[str, Any] = {
    "num_train_steps": 1,
    "policy_version": 1,
    "wall_s": 2.0,
    "loss": -0.01,
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "zero_variance_group_share": 0.1,
    "reward_lower_decile": 0.0,
    "reward_median": 0.5,
    "reward_upper_decile": 1.0,
    "reward_parts": {"arithmetic": 0.5},
    "reward_by_source": {"arithmetic": 0.5},
    "num_limited_rewards": 0,
    "advantage_mean": 0.01,
    "advantage_std": 0.5,
    "advantage_min": -1.0,
    "advantage_max": 1.0,
    "advantage_abs_mean": 0.4,
    "gradient_norm": 0.25,
    "learning_rate": 1e-4,
    "entropy": 0.14,
    "ratio_mean": 1.0,
    "ratio_max": 1.5,
    "ratio_clipped_share": 0.01,
    "ratio_limited_share": 0.0,
    "reference_kl_k1": 0.0,
    "reference_kl_k3": 0.0,
    "behaviour_weight_mean": 1.01,
    "behaviour_weight_max": 2.5,
    "behaviour_weight_clamped_share": 0.0,
    "behaviour_weight_masked_share": 0.0,
    "effective_sample_share": 0.98,
    "behaviour_kl_k1": 0.01,
    "behaviour_kl_k3": 0.012,
    "behaviour_kl_by_staleness": {0: 0.001, 1: 0.01, 2: 0.02},
    "proximal_kl_k1": 0.001,
    "proximal_kl_k3": 0.002,
    "mismatch_abs_mean": 1e-6,
    "mismatch_max": 1e-5,
    "lora_lost_share": 0.25,
    "kl_coefficient": 0.0,
    "staleness_mean": 0.75,
    "staleness_max": 2,
    "staleness_tokens": {0: 50, 1: 25, 2: 25},
    "masked_token_share": 0.02,
    "truncated_token_share": 0.0,
    "completion_tokens_mean": 41.0,
    "completion_tokens_max": 96,
    "completion_tokens_std": 12.0,
    "longest_of_group_mean": 60.0,
    "truncated_share": 0.05,
    "spanning_share": 0.02,
    "policy_tokens": 102,
    "trained_tokens": 100,
    "steps_since_start": 1000,
    "skipped_steps": 0,
    "failed_checkpoints": 0,
    "train_step_s": 1.5,
    "times_s": {"forward": 0.5, "backward": 0.9},
    "learner_tokens_per_s": 400.0,
    "model_flops_share": 0.4,
    "wait_s": 0.5,
    "learner_idle_s": 0.5,
    "rollout_idle_s": 0.1,
    "idle_share": {"learner": 0.25, "rollout": 0.05},
    "rollout_busy_s": 1.8,
    "decoding_s": 28.8,
    "generated_tokens": 150,
    "generated_tokens_per_s": 75.0,
    "trained_tokens_per_s": 50.0,
    "num_workers": 2,
    "weights_behind": 1,
    "filtered_prompts": 0,
    "epoch": 0.5,
    "truncated_prompts": 0,
}


@pytest.fixture
def ledger_counts() -> LedgerCounts:
    dropped, tokens = {"stale": 3, "reward_failed": 1}, {"stale": 90, "reward_failed": 7}
    return LedgerCounts(admitted=64, trained=32, dropped=dropped, dropped_tokens=tokens, buffered=12, in_flight=16)


@pytest.fixture
def eval_record() -> EvalRecord:
    return EvalRecord(
        name="arithmetic",
        policy_version=4,
        policy_version_max=4,
        accuracy=0.625,
        accuracy_error=0.034,
        reward=0.625,
        reward_error=0.034,
        num_prompts=200,
        num_samples=1,
        num_failed=0,
        pass_share=math.nan,
        majority_share=math.nan,
        completion_tokens_mean=44.5,
        wall_s=9.5,
    )


@pytest.fixture
def make_train_record(ledger_counts: LedgerCounts) -> MakeTrainRecord:
    """Gives the record of a step, with the fields that a test cares about."""
    base = TrainRecord(**STEP_NUMBERS, ledger=ledger_counts)

    def make(**changes: Any) -> TrainRecord:
        return msgspec.structs.replace(base, **changes)

    return make


@pytest.fixture
def make_trajectory() -> MakeTrajectory:
    """Gives the record of a trajectory, with the fields that a test cares about; lists follow `pieces` in length."""

    def make(**changes: Any) -> TrajectoryRecord:
        pieces = changes.setdefault("pieces", ["The", " answer", " is", " 7", "."])
        fields: dict[str, Any] = {
            "policy_version": 4,
            "group_id": 40,
            "sample_index": 3,
            "source": "arithmetic",
            "epoch": 0,
            "item_index": 17,
            "prompt": "What is 3 + 4?",
            "token_ids": list(range(100, 100 + len(pieces))),
            "logprobs": [-0.5] * len(pieces),
            "versions": [[4, len(pieces)]] if pieces else [],
            "spans": [],
            "reward": 1.0,
            "reward_parts": {},
            "advantage": 0.5,
            "staleness": 0,
            "finish_reason": "stop",
            "dropped": None,
        }
        return TrajectoryRecord(**fields | changes)

    return make
