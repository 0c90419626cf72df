"""Train records of a run with known speeds."""

from collections.abc import Callable, Sequence
from typing import Any

from areal_rloo.telemetry.records import TrainRecord

TOKENS = 384 * 40  # of a step of the quickstart with completions of 40 tokens
TRAIN_S, OTHER_S, BROADCAST_S = 1.4, 0.1, 0.2


def measured_steps(
    make: Callable[..., TrainRecord], sizes: Sequence[float], *, wait_s: float = 0.5, **changes: Any
) -> list[TrainRecord]:
    """Make a record for each size of the decode batch: a decode step of n completions takes 1 ms + 0.1 ms * n.

    `make` makes a record of changed fields.
    """
    records, busy_s, decoding_s = [], 0.0, 0.0
    for number, size in enumerate(sizes, start=1):
        decode_s = TOKENS / size * (0.001 + 0.0001 * size)
        busy_s, decoding_s = busy_s + decode_s, decoding_s + size * decode_s
        numbers = {
            **{"num_train_steps": number, "policy_version": number, "steps_since_start": number, "num_workers": 1},
            **{"wall_s": 5.0 + number * (TRAIN_S + OTHER_S + wait_s), "wait_s": wait_s, "train_step_s": TRAIN_S},
            **{"learner_idle_s": number * wait_s, "rollout_idle_s": 0.0, "masked_token_share": 0.0},
            **{"policy_tokens": TOKENS, "trained_tokens": TOKENS, "completion_tokens_max": 96},
            **{"generated_tokens": number * TOKENS, "rollout_busy_s": busy_s, "decoding_s": decoding_s},
            **{"completion_tokens_mean": 40.0, "completion_tokens_std": 10.0, "longest_of_group_mean": 50.0},
            "times_s": {"broadcast": BROADCAST_S},
        }
        records.append(make(**(numbers | changes)))
    return records
