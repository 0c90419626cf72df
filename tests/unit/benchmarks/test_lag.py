"""The methods that `benchmarks.lag` makes for its comparison, against slow and obvious references."""

import numpy as np
import pytest
import torch

from areal_rloo.config import BehaviourWeightConfig
from benchmarks.lag import MOST_SECOND_MOMENT, effective_share, second_moment_weights


def test_the_effective_share_counts_equal_weights() -> None:
    assert effective_share(torch.full((7,), 3.0)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([5.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)


@pytest.mark.parametrize("seed", range(20))
def test_the_second_moment_masks_the_largest_tokens_and_no_more(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logs = draw.normal(scale=draw.uniform(0.05, 0.5), size=50)
    in_loss = draw.random(50) < 0.8
    logs[~in_loss] = 0
    found = second_moment_weights(
        torch.tensor(logs), torch.tensor(in_loss), torch.zeros(50, dtype=torch.int64), BehaviourWeightConfig()
    )
    kept = [place for place in range(50) if in_loss[place]]
    while kept and np.mean([logs[place] ** 2 for place in kept]) > MOST_SECOND_MOMENT:
        kept.remove(max(kept, key=lambda place: logs[place] ** 2))
    masked = [place for place in range(50) if in_loss[place] and place not in kept]
    assert found.masked.nonzero().flatten().tolist() == masked
    assert found.weight[kept].tolist() == pytest.approx(np.exp(logs[kept]).tolist())
    assert not found.weight[masked].any()
