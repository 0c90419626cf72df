"""Compare the loss masks of a batch with a loop over tokens."""

from collections import Counter

import numpy as np
import pytest

from areal_rloo.config import load_config
from areal_rloo.learner.advantages import Samples, loss_masks
from areal_rloo.trajectory import Completion, Trajectory


def _trajectory(rng: np.random.Generator, group_id: int, sample_index: int) -> Trajectory:
    spans = tuple(rng.integers(1, 5, rng.integers(1, 5)).tolist())
    num = sum(spans)
    completion = Completion(
        np.arange(num, dtype=np.int32),
        np.zeros(num, np.float32),
        np.sort(rng.integers(0, 6, num)).astype(np.int32),
        "length" if rng.random() < 0.3 else "stop",
        spans if len(spans) > 1 else (),
    )
    return Trajectory(group_id, sample_index, np.ones(1, np.int32), completion, 0.0)


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_masks_equal_a_loop_over_tokens(seed: int, mask_truncated: bool) -> None:
    rng = np.random.default_rng(seed)
    trajectories = [_trajectory(rng, *rng.integers(0, 4, 2).tolist()) for _ in range(rng.integers(1, 20))]
    eta, version = int(rng.integers(0, 5)), 5
    config = load_config(
        "quickstart.yaml", [f"algorithm.max_staleness={eta}", f"algorithm.rewards.mask_truncated={mask_truncated}"]
    ).algorithm
    got = loss_masks(Samples(trajectories), policy_version=version, config=config)
    cut = {t.sample_id for t in trajectories if t.completion.finish_reason == "length"}
    staleness: Counter[int] = Counter()
    num_truncated = 0
    for index, trajectory in enumerate(trajectories):
        owners = [n % 2 == 0 for n, length in enumerate(trajectory.completion.spans) for _ in range(length)]
        expected, stale = [], 0
        versions = trajectory.completion.versions.tolist()
        for of_policy, sampled in zip(owners or [True] * len(versions), versions, strict=True):
            in_loss = of_policy and version - sampled <= eta
            stale += of_policy and not in_loss
            if in_loss and mask_truncated and trajectory.sample_id in cut:
                num_truncated, in_loss = num_truncated + 1, False
            if in_loss:
                staleness[version - sampled] += 1
            expected.append(in_loss)
        assert got.of_tokens[index].tolist() == expected
        assert got.stale_tokens[index] == stale
    # In this order: a replay compares texts with metrics.jsonl.
    assert list(got.staleness_tokens.items()) == sorted(staleness.items())
    assert got.num_truncated == num_truncated
