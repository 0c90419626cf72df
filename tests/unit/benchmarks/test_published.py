"""The simulation is near the published figures that follow from published numbers alone."""

import pytest

from benchmarks import published


def test_the_simulated_staleness_is_near_that_of_the_published_runs() -> None:
    """Also where neither the formula nor a full queue sets the number: with slower rollouts."""
    rows = published.staleness()
    assert [row["simulated"] for row in rows] == pytest.approx([row["published"] for row in rows], rel=0.1)


def test_the_learner_waits_for_the_share_of_the_published_rates() -> None:
    (row,) = published.waits()
    assert row["simulated"] == pytest.approx(1 - 1.95 / 2.75, abs=0.01)


def test_a_larger_threshold_makes_a_step_wait_less() -> None:
    decoding = published._synchronous(mean=2500, slope=2.0)
    waits = [published._verl_wait_s(decoding, share) for share in (0.0, 0.1, 0.3, 0.5)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[-1]
