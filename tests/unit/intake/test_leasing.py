"""Which groups are admitted, and which worker gets which sample."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from support.intakes import LEARNER, ONE_GROUP, fail, heartbeat, make_intake, make_offers
from support.slow_intake import missed_leases

from areal_rloo.intake import fleet
from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.codec import encode
from areal_rloo.wire.messages import Duty, Finished, Goodbye, Heartbeat, Hello, Lease, Leases, Results, Work, digest

TWO_GROUPS = (*ONE_GROUP, "learner.groups_per_step=2")


def _hello(worker_id: str = "w", *, capacity: int = 2, duties: Sequence[Duty] = (), newest: int = 0) -> Hello:
    return Hello(worker_id, "1", capacity, 0, LEARNER, 1, newest, tuple(duties), Work())


def _leases(messages: Sequence[Outgoing], peer: str = "w") -> list[Lease]:
    granted = [message for to, message in messages if isinstance(message, Leases) and to == peer]
    return [lease for message in granted for lease in message.leases]


def _duties(messages: Sequence[Outgoing], peer: str = "w") -> list[Duty]:
    return [duty for lease in _leases(messages, peer) for duty in lease.duties]


def _finish(
    intake: Intake, duties: Sequence[Duty], peer: str = "w", *, token: int = 3, version: int = 0, now_s: float = 0.0
) -> list[Outgoing]:
    tokens, versions = np.array([token], np.int32), np.array([version], np.int32)
    completion = Completion(tokens, np.array([-1.0], np.float32), versions, "stop")
    prompt = np.array([1, 2], np.int32)
    made = [Finished(duty.lease_id, (Trajectory(*duty.sample_id, prompt, completion, 1.0),)) for duty in duties]
    return intake.handle(peer, Results(LEARNER, 7, tuple(made)), now_s)


def _with_evaluation(*options: str) -> Intake:
    intake = make_intake(make_offers(), *ONE_GROUP, *options)
    prompts = [Prompt(0, index, (1, 2), Item("?")) for index in range(4)]
    intake.evaluation = intake._leasing.evaluation = Evaluation([EvalSet("mine", prompts)], lambda record: None)
    return intake


# -- admission ---------------------------------------------------------------------------------------------------------


def test_no_more_groups_are_admitted_than_workers_have_room_for() -> None:
    """A group that waits for room would only grow stale."""
    intake = make_intake(make_offers(), *ONE_GROUP, "learner.groups_per_step=4")
    intake.handle("w", _hello(capacity=2), 0.0)
    assert intake.ledger.admitted_groups == 1
    intake.handle("x", _hello("x", capacity=3), 0.0)
    assert intake.ledger.admitted_groups == 3


def test_lost_samples_take_their_room_before_new_groups_are_admitted() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    lost = _duties(intake.handle("w", _hello(), 0.0))
    intake.handle("w", Goodbye(LEARNER, Work()), 0.0)
    again = _duties(intake.handle("x", _hello("x"), 0.0), "x")
    assert [duty.sample_id for duty in again] == [duty.sample_id for duty in lost]
    assert intake.ledger.admitted_groups == 1


def test_a_worker_starts_no_sample_with_weights_older_than_at_its_hello() -> None:
    """Not even a sample of a group admitted before."""
    intake = make_intake(make_offers(), *ONE_GROUP, "algorithm.max_staleness=1")
    first = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    _finish(intake, first[:2])
    assert intake.take_batch() is not None
    intake.commit(1, evaluate=False)
    intake.handle("w", Goodbye(LEARNER, Work()), 0.0)
    leases = _leases(intake.handle("x", _hello("x"), 0.0), "x")
    assert {duty.sample_id for lease in leases for duty in lease.duties} == {duty.sample_id for duty in first[2:]}
    assert [lease.min_version for lease in leases] == [1]


def test_nothing_is_leased_and_no_batch_taken_while_draining() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    duties = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    intake.draining = True
    assert _duties(intake.handle("x", _hello("x", capacity=4), 0.0), "x") == []
    intake.handle("w", Goodbye(LEARNER, Work()), 0.0)
    assert _duties(intake.tick(1.0), "x") == []
    intake.draining = False
    again = _duties(intake.tick(1.0), "x")
    assert [duty.sample_id for duty in again] == [duty.sample_id for duty in duties]
    _finish(intake, again, "x")
    intake.draining = True
    assert intake.take_batch() is None
    intake.draining = False
    assert intake.take_batch() is not None


def test_there_are_more_batches_until_the_last_group_is_trained() -> None:
    stream = PromptStream([Source("all", [Item("a"), Item("b")])], lambda *_: (1, 2), seed=0, num_epochs=1)
    intake = make_intake(make_offers(), *ONE_GROUP, stream=stream)
    duties = _duties(intake.handle("w", _hello(), 0.0))
    for version in (0, 1):
        assert not intake.no_more_batches
        _finish(intake, duties, version=version)
        assert intake.take_batch() is not None
        assert not intake.no_more_batches
        duties = _duties(intake.commit(version + 1, evaluate=False))
    assert intake.no_more_batches


# -- who gets which sample ---------------------------------------------------------------------------------------------


def _with_a_liar(intake: Intake, *, capacity: int) -> None:
    intake.handle("liar", _hello("liar", capacity=capacity), 0.0)
    _finish(intake, [Duty(10**6, 0, 0)], "liar")
    assert intake.fleet.alive["liar"].num_lies == 1


def test_a_liar_with_room_gets_samples_if_the_others_are_full() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    assert len(_duties(intake.handle("w", _hello(capacity=2), 0.0))) == 2
    first, _ = _duties(intake.handle("liar", _hello("liar", capacity=2), 0.0), "liar")
    again = _duties(_finish(intake, [first], "liar", token=10**6), "liar")
    assert [duty.sample_id for duty in again] == [first.sample_id]
    assert intake.fleet.alive["liar"].num_lies == 1


@pytest.mark.parametrize("has_others", [True, False])
def test_a_liar_gets_evaluation_samples_only_if_alone(has_others: bool) -> None:
    intake = _with_evaluation("learner.groups_per_step=2")
    _with_a_liar(intake, capacity=2)
    if has_others:
        intake.handle("w", _hello(), 0.0)
    sent = intake.evaluate()
    assert (len(_duties(sent)), len(_duties(sent, "liar"))) == ((4, 0) if has_others else (0, 4))


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_commit_evaluates_the_version_if_it_is_due(evaluate: bool) -> None:
    intake = _with_evaluation()
    duties = _duties(intake.handle("w", _hello(), 0.0))
    _finish(intake, duties)
    assert intake.take_batch() is not None
    leases = [lease for lease in _leases(intake.commit(1, evaluate=evaluate)) if lease.group_id < 0]
    assert [lease.min_version for lease in leases] == ([1] * 4 if evaluate else [])


def test_a_lie_about_an_evaluation_sample_costs_that_sample() -> None:
    intake = _with_evaluation()
    intake.handle("liar", _hello("liar"), 0.0)
    duties = [duty for duty in _duties(intake.evaluate(), "liar") if duty.purpose == "eval"]
    intake.handle("w", _hello(), 0.0)
    sent = _finish(intake, duties[:1], "liar", token=10**6)
    assert intake.lies.statistics().refused_answers == {"vocabulary": 1}
    assert [duty.sample_id for duty in _duties(sent)] == [duties[0].sample_id]
    _finish(intake, duties[1:], "liar")
    assert not intake.evaluation.finished
    _finish(intake, _duties(sent))
    assert intake.evaluation.finished


def test_a_lease_on_its_way_at_a_hello_is_not_lost() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    first = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    assert {duty.lease_id for duty in first} == {1, 2}
    seen = [duty for duty in first if duty.lease_id == 1]
    intake.handle("w", _hello(capacity=4, duties=seen, newest=1), 1.0)
    assert intake.fleet.alive["w"].duties == set(first)


def test_a_worker_with_the_right_duties_need_not_say_hello() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    duties = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    right = Heartbeat(LEARNER, 2, 2, digest(duties), 0, 0, receiving=False, work=Work())
    replies = []
    for now_s, told in enumerate((duties, duties[:2], duties[:3])):
        sent = intake.handle("w", msgspec.structs.replace(right, duties=digest(told)), float(now_s))
        replies.append(sent[0].message.say_hello)  # type: ignore[union-attr]
    assert replies == [False, True, True]


def test_many_duties_are_compared_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand samples at each of a thousand workers, they were a third of the loop's time."""
    monkeypatch.setattr(fleet, "_COMPARED", 2)
    intake = make_intake(make_offers(), *TWO_GROUPS)
    duties = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    right = Heartbeat(LEARNER, 2, 2, digest(duties), 0, 0, receiving=False, work=Work())
    replies = []
    for now_s, told in ((0.0, duties), (1.9, duties[:1]), (2.0, duties[:1])):
        sent = intake.handle("w", msgspec.structs.replace(right, duties=digest(told)), now_s)
        replies.append(sent[0].message.say_hello)  # type: ignore[union-attr]
    assert replies == [False, False, True]


def test_results_look_for_no_room_once_the_prompts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    duties = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    looks = []
    with_room = fleet.Fleet.with_room
    monkeypatch.setattr(fleet.Fleet, "with_room", lambda self: looks.append(0) or with_room(self))
    monkeypatch.setattr(type(intake.stream), "exhausted", True)
    _finish(intake, duties[:1], now_s=1.0)
    assert not looks


# -- progress ----------------------------------------------------------------------------------------------------------


def test_results_are_progress() -> None:
    """Even if the worker counts no tokens."""
    intake = make_intake(make_offers(), *TWO_GROUPS, "wire.stall_timeout_s=60", "wire.heartbeat_timeout_s=1000")
    duties = _duties(intake.handle("w", _hello(capacity=4), 0.0))
    intake.handle("x", _hello("x", capacity=4), 0.0)
    _finish(intake, duties[:1], now_s=50.0)
    assert intake.tick(100.0) == []
    assert len(_duties(intake.tick(111.0), "x")) == 3
    assert not intake.fleet.alive["w"].gets_leases


def _lease_of(seed: int) -> Lease:
    sent = make_intake(make_offers(), *ONE_GROUP, f"run.seed={seed}").handle("w", _hello(), 0.0)
    return next(message.leases[0] for _, message in sent if isinstance(message, Leases))


@pytest.mark.parametrize("seed", [0, 2**20, 20_240_101, 2**62])
def test_the_seed_of_a_lease_fits_the_wire(seed: int) -> None:
    lease = _lease_of(seed)
    assert encode(Leases(LEARNER, (lease,)))
    assert 0 <= lease.seed < 2**64 - 2**20


def test_run_seeds_give_leases_with_different_seeds() -> None:
    assert len({_lease_of(seed).seed for seed in (0, 1, 2, 2**20, 2**20 + 1, 2**40)}) == 6


def test_an_evaluation_does_not_look_at_all_workers_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples without a last holder can go to any worker; thousands of prompts are leased in a single call."""

    class Unread(set[str]):
        def __contains__(self, name: object) -> bool:
            raise AssertionError("the worker was compared with no holder")

    monkeypatch.setattr("areal_rloo.intake.leasing.Leasing._last_holders", lambda *_: Unread())
    intake = _with_evaluation()
    outgoing = [*intake.handle("a", _hello("a"), 0.0), *intake.handle("b", _hello("b"), 0.0), *intake.evaluate()]
    assert any(duty.purpose == "eval" for peer in ("a", "b") for duty in _duties(outgoing, peer))


def test_a_worker_that_makes_progress_again_gets_lost_samples_at_once() -> None:
    """The samples lost while it was stalled must not wait for the next look at all workers."""
    intake = make_intake(make_offers(), *ONE_GROUP)
    for name in "ab":
        intake.handle(name, _hello(name, capacity=8), 0.0)
    stalls_s = intake._wire.stall_timeout_s + 1.0
    for name in "ab":
        intake.handle(name, heartbeat(), stalls_s)
    duties = _duties(intake.tick(stalls_s), "b")  # `a` made no progress
    intake.tick(stalls_s + 0.25)
    fail(intake, "b", duties, now_s=stalls_s + 0.26)
    intake.handle("a", heartbeat(tokens=5), stalls_s + 0.3)
    sent = intake.handle("b", Goodbye(LEARNER, Work()), stalls_s + 0.35)
    assert len(_duties(sent, "a")) == 2
    assert missed_leases(intake._leasing, 0, 0) == []
