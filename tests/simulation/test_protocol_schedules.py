"""Search schedules of messages, crashes and faults for a broken invariant, and prove that the search can find one.

`python -m simulation.search` (in tests/) searches many more.
"""

import logging
from collections.abc import Iterator

import pytest
from simulation.mutations import MUTATIONS, mutated
from simulation.search import failure_of, first_failure, shortened, story_of
from simulation.simulated_run import CONFIGS, Simulation
from simulation.world import Fault, Schedule

NUM_SCHEDULES = 2000
MOST_SCHEDULES = 10_000  # until a mutation must be found
PARTS = 4


@pytest.fixture(autouse=True)
def silenced() -> Iterator[None]:
    """The parts log thousands of warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _drawn(seed: int) -> Schedule:
    return Schedule.drawn(seed, len(CONFIGS))


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_breaks_an_invariant_and_every_run_ends(part: int) -> None:
    found = first_failure(range(part, NUM_SCHEDULES, PARTS))
    assert found is None, "\n".join(story_of(_drawn(found[0])))


@pytest.mark.parametrize("kind", ["kill_worker", "lose_host"])
def test_samples_of_a_dead_worker_begin_elsewhere_in_time(kind: str) -> None:
    """In time: two heartbeats and a second, or `wire.heartbeat_timeout_s` and a second if no connection closed."""
    num_begun = 0
    for seed in range(300):
        fault = Fault(0.5 + 2.0 * (seed / 300), kind, seed % 2, 0.1)
        simulation = Simulation(Schedule(seed, 2 + seed % 2, seed % len(CONFIGS), seed % 3 == 0, False, (fault,)))
        simulation.run()
        num_begun += simulation.num_begun_again
    assert num_begun > 50, "too few workers died with samples"


@pytest.mark.rare
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_search_finds_every_mend_that_is_taken_out(name: str) -> None:
    with mutated(name):
        found = first_failure(range(MOST_SCHEDULES))
    assert found is not None
    assert found[1].startswith(("ViolationError", "AssertionError", "KeyError")), "the mutation itself is broken"


def test_every_mend_can_be_taken_out_and_put_back() -> None:
    """The searches for them run only with all tests; a changed name in the code is noticed here."""
    for name in MUTATIONS:
        with mutated(name):
            pass
    assert failure_of(_drawn(0)) is None


def test_the_search_finds_a_defect_and_tells_its_shortened_story() -> None:
    with mutated("results_are_not_sent_again"):
        found = first_failure(range(MOST_SCHEDULES))
        assert found is not None
        schedule = shortened(_drawn(found[0]))
        story = list(story_of(_drawn(found[0])))
        for fault in schedule.faults:
            assert failure_of(schedule.without([fault])) is None, "a fault that the failure does not need"
            assert str(fault) in story
    assert "the run stands still" in story[-1]
    assert failure_of(_drawn(found[0])) is None


def test_schedules_continue_partial_rollouts() -> None:
    """Else no invariant would ever see a continued sample."""
    simulations = [Simulation(_drawn(seed)) for seed in range(300)]
    for simulation in simulations:
        simulation.run()
    assert sum(simulation.num_continued for simulation in simulations) > 10


@pytest.mark.parametrize("kind", ["fail_rewards", "holds_for_good"])
def test_schedules_set_workers_aside(kind: str) -> None:
    """Else no invariant would ever see them."""
    assert sum(simulation.num_set_aside for simulation in _with_fault_alone(kind)) > 5


def test_schedules_refuse_second_processes() -> None:
    assert sum(simulation.num_refused for simulation in _with_fault_alone("second_process")) > 10


def _with_fault_alone(kind: str) -> Iterator[Simulation]:
    """Run the schedules with this fault, and without others that set workers aside."""
    others = {"fail_rewards", "holds_for_good"} - {kind}
    for schedule in map(_drawn, range(1500)):
        kinds = {fault.kind for fault in schedule.faults}
        if kind in kinds and not others & kinds:
            simulation = Simulation(schedule)
            simulation.run()
            yield simulation


def test_a_schedule_runs_the_same_way_again() -> None:
    with mutated("results_are_not_sent_again"):
        found = first_failure(range(MOST_SCHEDULES))
        assert found is not None
        assert list(story_of(_drawn(found[0]))) == list(story_of(_drawn(found[0])))
