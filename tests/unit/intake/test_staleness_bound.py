"""The staleness bound and the ledger, by random schedules over the real admission, leasing, ledger and buffer.

A schedule is a list of small numbers that decides what happens next: a sample finishes, a worker dies or takes the
newest weights, a reward fails, the learner trains. Every token is tagged as an engine would tag it.
"""

import contextlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.intakes import duties_of, make_intake, make_offers
from support.staleness_schedules import Simulation, make_config

from areal_rloo.algorithm.staleness import must_wait, num_admissible
from areal_rloo.config import AlgorithmConfig, Config, LearnerConfig, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.saved_ledger import by_sample, ledger_of, ledger_state
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.messages import Finished, Hello, Results, Work

GROUP_SIZE, GROUPS_PER_STEP, NUM_STEPS, NUM_WORKERS = 3, 2, 6, 2


@settings(max_examples=150)
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["mask", "drop", "wait"]),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 11)), max_size=250),
)
def test_no_schedule_breaks_the_bound_or_the_ledger_and_every_run_ends(
    max_staleness: int, pipeline_depth: int, stale_tokens: str, every: int, schedule: list[tuple[int, int, int]]
) -> None:
    every = min(every, max_staleness + 1)  # `validate` refuses more
    options = {"max_staleness": max_staleness, "pipeline_depth": pipeline_depth, "stale_tokens": stale_tokens}
    simulation = Simulation(make_config(**options, publish_every=every))  # type: ignore[arg-type]
    for what, who, pick in schedule:
        simulation.act(what, who, pick)
    simulation.run_out()
    counts = simulation.ledger.counts()
    assert counts.buffered == counts.in_flight == 0
    assert counts.admitted == counts.trained + sum(counts.dropped.values())


@pytest.mark.parametrize("eta", range(4))
@pytest.mark.parametrize("every", range(1, 6))
def test_a_config_that_would_admit_no_group_is_refused(eta: int, every: int) -> None:
    """In the worst step, the last before a new version, no group is live."""
    options = {"max_staleness": eta, "pipeline_depth": 1, "groups_per_step": 2, "num_train_steps": 99, "num_live": 0}
    admits = num_admissible(policy_version=20 + every - 1, published_version=20, **options) > 0
    overrides = [f"algorithm.max_staleness={eta}", f"weights.publish_every_n_steps={every}"]
    expected = rf"publish_every_n_steps: expected at most .* = {eta + 1}, got {every}; .*max_staleness={every - 1}"
    with contextlib.nullcontext() if admits else pytest.raises(ConfigError, match=expected):
        load_config("quickstart.yaml", overrides)


def test_under_wait_the_step_waits_for_the_group_that_would_go_stale() -> None:
    assert must_wait(policy_version=3, groups_per_step=2, num_left={3: 1})
    assert not must_wait(policy_version=3, groups_per_step=2, num_left={4: 2})
    assert must_wait(policy_version=3, groups_per_step=2, num_left={4: 3})


def test_a_straggler_is_masked_dropped_or_waited_for_as_configured() -> None:
    outcomes = {}
    for policy in ("mask", "drop", "wait"):
        simulation = Simulation(make_config(max_staleness=1, stale_tokens=policy))
        (first, *_), holder = list(simulation.held["w0"]), simulation.held["w0"]
        simulation.decode("w0")
        simulation.decode("w1")
        straggler = {first: holder.pop(first)}
        for _ in range(400):
            for worker_id in simulation.held:
                simulation.engine_version[worker_id] = simulation.version
                simulation.decode(worker_id)
                simulation.finish(worker_id, 0)
            simulation.train()
        outcomes[policy] = simulation.version
        holder.update(straggler)
        simulation.run_out()
        outcomes[policy + " dropped"] = dict(simulation.ledger.counts().dropped)
    assert outcomes["wait"] < outcomes["mask"]
    assert outcomes["drop dropped"] == {"stale": 1} or "stale" in outcomes["drop dropped"]
    assert outcomes["mask dropped"] == outcomes["wait dropped"] == {}


def test_a_stale_worker_starts_no_group_admitted_after_its_version() -> None:
    simulation = Simulation(make_config(max_staleness=1, stale_tokens="wait"))
    while simulation.version < 3:
        simulation.engine_version["w1"] = simulation.version
        for worker_id in ("w0", "w1"):
            simulation.decode(worker_id)
            simulation.finish(worker_id, 0)
        if not any(versions for versions in simulation.held["w0"].values()) and simulation.held["w0"]:
            break  # all it holds was admitted later than its version 0
        simulation.train()
    assert simulation.version > 0
    assert set(simulation.engine_version.values()) != {0}
    assert all(versions == [] for versions in simulation.held["w0"].values())
    simulation.run_out()


def test_a_sample_is_dropped_after_max_attempts_without_its_group() -> None:
    simulation = Simulation(make_config(max_staleness=1, stale_tokens="mask"))
    for _ in range(3):
        for worker_id in ("w0", "w1"):
            simulation.join(worker_id)
    assert simulation.ledger.counts().dropped["max_attempts"] > 0
    simulation.check_ledger()
    simulation.run_out()


def test_a_restored_ledger_leases_samples_in_flight_again() -> None:
    simulation = Simulation(make_config(max_staleness=2, stale_tokens="mask"))
    for worker_id in ("w0", "w1"):
        simulation.decode(worker_id)
        simulation.finish(worker_id, 0)
    state = msgspec.msgpack.decode(
        msgspec.msgpack.encode(ledger_state(simulation.ledger)), type=type(ledger_state(simulation.ledger))
    )
    live = simulation.ledger.groups
    trajectories = by_sample(t for g in live.values() for s in g.samples.values() for t in s.trajectories)
    restored = ledger_of(state, {name: group.prompt for name, group in live.items()}, trajectories)
    assert restored.counts() == simulation.ledger.counts()
    waiting = sum(len(group.waiting) for group in restored.groups.values())
    assert waiting == restored.counts().in_flight


def test_a_finished_sample_accepts_nothing_more() -> None:
    simulation = Simulation(make_config(max_staleness=1, stale_tokens="mask"))
    simulation.decode("w0")
    duty = next(iter(simulation.held["w0"]))
    simulation.finish("w0", 0)
    sample = simulation.ledger.sample(duty.sample_id)
    assert sample is not None and sample.trajectories
    with pytest.raises(AssertionError, match="finishes once"):
        sample.finish(sample.trajectories)
    assert not sample.is_newest(duty.lease_id)
    assert not sample.lose(duty.lease_id, is_attempt=True)


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_restored_stream_continues_the_epoch(num_epochs: int) -> None:
    def stream() -> PromptStream:
        sources = [Source("all", [Item(str(index)) for index in range(7)])]
        return PromptStream(sources, lambda item, _: (int(item.text) + 1,), seed=3, num_epochs=num_epochs)

    one, other = stream(), stream()
    taken = [one.take() for _ in range(5)]
    assert taken[0] is not None
    one.give_back(taken[0].epoch, taken[0].item_index)
    other.restore(one.state())
    rest = []
    while (prompt := other.take()) is not None:
        rest.append(prompt)
    assert rest[0] == taken[0]
    seen = Counter((p.epoch, p.item_index) for p in [*taken[1:], *rest] if p is not None)
    assert seen == Counter((epoch, index) for epoch in range(num_epochs) for index in range(7))


def test_a_stale_group_at_the_end_of_the_data_makes_no_small_batch() -> None:
    stream = PromptStream([Source("all", [Item("?")] * 6)], lambda *_: (1, 2), seed=0, num_epochs=1)
    sizes = ("algorithm.group_size=2", "learner.groups_per_step=2", "learner.num_minibatches=1")
    intake = make_intake(make_offers(), *sizes, "algorithm.max_staleness=1", stream=stream)
    duties = duties_of(intake.handle("w", Hello("w", "1", 99, 0, None, 1, 0, (), Work()), 0.0))

    def finish(group_id: int, version: int) -> None:
        held = [duty for duty in duties if duty.group_id == group_id]
        tokens, logprobs, versions = (
            np.array([3], np.int32),
            np.array([-1.0], np.float32),
            np.array([version], np.int32),
        )
        completion = Completion(tokens, logprobs, versions, "stop")
        made = [Trajectory(*duty.sample_id, np.array((1, 2), np.int32), completion, 1.0) for duty in held]
        finished = tuple(Finished(duty.lease_id, (each,)) for duty, each in zip(held, made, strict=True))
        intake.handle("w", Results("learner", 7, finished), 0.0)

    def taken() -> list[int]:
        return [group.group_id for group in intake.take_batch() or ()]

    for version, first in enumerate((0, 4)):
        finish(first, version)
        finish(first + 1, version)
        assert taken() == [first, first + 1]
        duties += duties_of(intake.commit(version + 1, evaluate=False))
    assert (sorted(intake.ledger.groups), stream.exhausted) == ([2, 3], True)
    finish(2, 2)
    finish(3, 0)  # every token is past the bound
    assert taken() == [], "a prompt is left for another group"
    duties += duties_of(intake.tick(0.0))
    finish(6, 2)
    assert taken() == [2, 6]


def test_a_prompt_returned_after_the_end_of_the_data_is_leased_again() -> None:
    stream = PromptStream([Source("all", [Item("a"), Item("b")])], lambda item, _: (1,), seed=0, num_epochs=1)
    config = Config(
        algorithm=AlgorithmConfig(group_size=2, stale_tokens="drop"),
        learner=LearnerConfig(groups_per_step=1, num_train_steps=9),
    )
    ledger = Ledger()
    buffer = Buffer(ledger, config=config, give_back=stream.give_back)
    evaluation = Evaluation([], lambda record: None)
    fleet = Fleet(most_samples=1000)
    leasing = Leasing(config=config, ledger=ledger, fleet=fleet, buffer=buffer, stream=stream, evaluation=evaluation)
    hello = Hello("w", "1", 99, 0, None, 1, 0, (), Work())
    fleet.welcome(hello, "w", now_s=0.0, policy_version=0)
    ((_, first),) = leasing.grants(5, 5)
    assert (len(first), stream.exhausted) == (2, True)
    ledger.drop_group(0, "stale")
    stream.give_back(0, 0)
    ((_, second),) = leasing.grants(5, 5)
    assert [lease.item.text for lease in second] == [first[0].item.text]
    assert leasing.grants(5, 5) == []
    assert stream.exhausted
