"""The staleness bound and the ledger over resumes with other options, by random schedules over the real parts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.intakes import LEARNER, make_intake, make_offers
from support.staleness_schedules import NUM_STEPS, Simulation, make_config

from areal_rloo.config import load_config
from areal_rloo.intake.refit import refit
from areal_rloo.intake.saved_ledger import by_sample, ledger_of, ledger_state
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire import messages as wire

_OPTIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.sampled_from([4, 40]),
        "microbatch_tokens": st.sampled_from([4, 12, 40]),
        "max_staleness": st.integers(0, 3),
        "pipeline_depth": st.integers(1, 3),
        "stale_tokens": st.sampled_from(["mask", "drop", "wait"]),
        "group_size": st.integers(2, 4),
        "groups_per_step": st.integers(1, 5),
    }
).filter(lambda options: options["max_new_tokens"] <= options["microbatch_tokens"])
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


_TWO_GROUPS = (
    "learner.groups_per_step=2",
    "learner.num_minibatches=1",
    "algorithm.group_size=2",
    "algorithm.max_staleness=1",
    "data.max_prompt_tokens=64",
)


def _finished(duty: wire.Duty, num_tokens: int) -> wire.Finished:
    logprobs, versions = np.full(num_tokens, -1, np.float32), np.zeros(num_tokens, np.int32)
    completion = Completion(np.full(num_tokens, 3, np.int32), logprobs, versions, "stop")
    prompt, reward = np.array([1, 2], np.int32), float(duty.sample_index)
    return wire.Finished(duty.lease_id, (Trajectory(*duty.sample_id, prompt, completion, reward),))


@pytest.mark.parametrize("long", [{0, 1}, {0}])  # samples of each group that are longer than a row of the resume
def test_groups_longer_than_a_row_are_dropped_and_come_again(long: set[int]) -> None:
    before = (*_TWO_GROUPS, "rollout.sampling.max_new_tokens=448", "learner.microbatch_tokens=512")
    now = (*_TWO_GROUPS, "rollout.sampling.max_new_tokens=64", "learner.microbatch_tokens=128")
    first = make_intake(make_offers(), *before)
    sent = first.handle("aa", wire.Hello("w", "1", 4, 0, None, 1, 0, (), wire.Work()), 0.0)
    leases = [lease for each in sent if isinstance(each.message, wire.Leases) for lease in each.message.leases]
    duties = [duty for lease in leases for duty in lease.duties]
    finished = tuple(_finished(duty, 300 if duty.sample_index in long else 127) for duty in duties)
    first.handle("aa", wire.Results(LEARNER, 2, finished), 0.0)
    groups = first.ledger.groups
    buffered = by_sample(t for group in groups.values() for s in group.samples.values() for t in s.trajectories)
    assert len(buffered) == 4
    ledger = ledger_of(ledger_state(first.ledger), {name: group.prompt for name, group in groups.items()}, buffered)

    given_back: list[tuple[int, int]] = []
    configs = [load_config("quickstart.yaml", options) for options in (before, now)]
    num_dropped = refit(
        ledger,
        before=configs[0],
        now=configs[1],
        policy_version=0,
        give_back=lambda epoch, item_index: given_back.append((epoch, item_index)),
    )
    counts = make_intake(make_offers(), *now, ledger=ledger).ledger.counts()
    assert (num_dropped, counts.buffered, counts.dropped) == (2, 0, {"options_changed": 4})
    assert given_back == [(group.prompt.epoch, group.prompt.item_index) for group in groups.values()][:2]
