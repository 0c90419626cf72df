"""The staleness bound and the ledger over resumes with other options, by random schedules over the real parts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.staleness_schedules import NUM_STEPS, Simulation, make_config

_OPTIONS = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 3),
        "stale_tokens": st.sampled_from(["mask", "drop", "wait"]),
        "group_size": st.integers(2, 4),
        "groups_per_step": st.integers(1, 5),
    }
)
_ACTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 11)), max_size=80)


@settings(max_examples=150)
@given(st.lists(st.tuples(_OPTIONS, _ACTS), min_size=1, max_size=4), st.integers(NUM_STEPS, NUM_STEPS + 4))
def test_no_resume_with_other_options_breaks_the_bound_or_hangs(
    stretches: list[tuple[dict[str, Any], list[tuple[int, int, int]]]], num_train_steps: int
) -> None:
    simulation = None
    for options, schedule in stretches:
        config = make_config(**options, num_train_steps=num_train_steps)
        if simulation is None:
            simulation = Simulation(config)
        else:
            simulation.resume(config)
        simulation.check_ledger()
        for what, who, pick in schedule:
            simulation.act(what, who, pick)
    assert simulation is not None
    simulation.run_out()
    counts = simulation.ledger.counts()
    assert counts.buffered == counts.in_flight == 0
    assert counts.admitted == counts.trained + sum(counts.dropped.values())


def _resumed(before: dict[str, Any], now: dict[str, Any]) -> Simulation:
    simulation = Simulation(make_config(**{"max_staleness": 2, "stale_tokens": "mask"} | before))
    for worker_id in ("w0", "w1"):
        simulation.decode(worker_id)
        simulation.finish(worker_id, 0)
    simulation.resume(make_config(**{"max_staleness": 2, "stale_tokens": "mask"} | now))
    simulation.check_ledger()
    return simulation


def test_a_resume_with_the_same_options_drops_nothing() -> None:
    assert _resumed({}, {}).ledger.counts().dropped == {}
    assert _resumed({}, {"num_train_steps": 60}).ledger.counts().dropped == {}


@pytest.mark.parametrize(
    ("before", "now", "num_kept"),
    [
        ({"groups_per_step": 2}, {"groups_per_step": 1}, 3),  # of 6 groups for three steps
        ({"groups_per_step": 2}, {"groups_per_step": 4}, 6),
        ({"max_staleness": 2}, {"max_staleness": 0}, 2),
        ({"num_train_steps": 6}, {"num_train_steps": 1}, 2),
    ],
)
def test_groups_that_no_step_can_train_in_time_are_dropped(
    before: dict[str, Any], now: dict[str, Any], num_kept: int
) -> None:
    large = {"group_size": 2, "groups_per_step": 2}
    simulation = _resumed(large | before, large | now)
    assert sum(group_id < 6 for group_id in simulation.ledger.groups) == num_kept
    assert simulation.ledger.counts().dropped == ({"options_changed": 2 * (6 - num_kept)} if num_kept < 6 else {})


def test_live_groups_keep_their_size_unless_too_small_for_a_baseline() -> None:
    for group_size in (2, 4):
        simulation = _resumed({"group_size": 3}, {"group_size": group_size})
        assert [len(group.samples) for group in simulation.ledger.groups.values()] == 6 * [3]
    simulation = _resumed({"group_size": 1, "groups_per_step": 1}, {"group_size": 4, "groups_per_step": 1})
    assert simulation.ledger.counts().dropped == {"options_changed": 3}
    assert {len(group.samples) for group in simulation.ledger.groups.values()} == {4}


def test_prompts_of_dropped_groups_come_again_first() -> None:
    simulation = _resumed({"groups_per_step": 2}, {"groups_per_step": 1})
    dropped = set(range(6)) - set(simulation.ledger.groups)
    simulation.run_out()
    trained = simulation.trained_prompts
    assert len(dropped) == 3
    assert len(trained) == 6  # the prompts of the six groups admitted first
    assert simulation.stream.state().taken == [6]
