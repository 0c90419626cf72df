"""Workers with the keys and bad intentions: they hold samples, or come and go, and the honest worker goes on."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.intakes import LEARNER, ONE_GROUP, VOCAB_SIZE, duties_of, fail, heartbeat, make_intake, make_offers

from areal_rloo.config import load_config
from areal_rloo.errors import UserError
from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.fleet import SET_ASIDE_S, Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Grant, Sample
from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.worker import LAST_OUTCOMES
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.messages import (
    MOST_COUNT,
    Abort,
    Duty,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Partial,
    Partials,
    Refusal,
    Results,
    Welcome,
    Work,
)

CONFIG = load_config("quickstart.yaml", ONE_GROUP)
TWO_GROUPS = (*ONE_GROUP, "learner.groups_per_step=2")


def _hello(worker_id: str, incarnation: str = "1", *, capacity: int = 2, duties: Sequence[Duty] = ()) -> Hello:
    return Hello(worker_id, incarnation, capacity, 0, LEARNER, 1, MOST_COUNT, tuple(duties), Work())


# -- lies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["finished", "failed", "partials"])
def test_what_follows_eight_lies_in_a_message_is_not_looked_at(kind: str) -> None:
    intake = make_intake(make_offers(), "algorithm.group_size=4", "learner.groups_per_step=4")
    duties = duties_of(intake.handle("liar", _hello("liar", capacity=16), 0.0))
    lies, rest = duties[:8], duties[8:]
    assert len(rest) == 8

    def answer(duty: Duty, token: int) -> Finished:
        tokens, logprobs = np.array([token], np.int32), np.array([-1.0], np.float32)
        completion = Completion(tokens, logprobs, np.zeros(1, np.int32), "stop")
        return Finished(duty.lease_id, (Trajectory(*duty.sample_id, np.array((1, 2), np.int32), completion, 1.0),))

    finished, failed = tuple(answer(duty, VOCAB_SIZE) for duty in lies), ()
    match kind:
        case "finished":
            finished += tuple(answer(duty, 3) for duty in rest)
        case "failed":
            failed = tuple(Failed(*duty, "reward_error", "no", "", 1) for duty in rest)
    message: Results | Partials = Results(LEARNER, 7, finished, failed)
    if kind == "partials":
        message = Partials(LEARNER, 0, tuple(Partial(*duty, b"?") for duty in duties), last=True)
    intake.handle("liar", message, 0.0)
    counts, lied = intake.statistics().ledger, intake.lies.statistics()
    assert (lied.cut_off, sum(lied.refused_answers.values())) == (1, 8)
    assert (counts.buffered, counts.dropped, counts.in_flight) == (0, {}, 16)


# -- holding samples ---------------------------------------------------------------------------------------------------


def test_a_worker_gets_no_more_samples_than_the_config_says() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS, "rollout.num_slots=1", "rollout.lease_ahead_samples=1")
    assert len(duties_of(intake.handle("hog", _hello("hog", capacity=2**19), 0.0), "hog")) == 2
    assert len(duties_of(intake.handle("honest", _hello("honest"), 0.0), "honest")) == 2


def test_samples_held_for_too_long_go_elsewhere_whatever_the_progress() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS, "wire.stall_timeout_s=60", "rollout.episode.timeout_s=740")
    held = duties_of(intake.handle("hog", _hello("hog"), 0.0), "hog")
    intake.handle("honest", _hello("honest"), 0.0)
    sent: list[Outgoing] = []
    ended_s = 0.0
    while not sent:
        ended_s += 10.0
        for worker in ("hog", "honest"):
            intake.handle(worker, heartbeat(intake.fleet.alive[worker].duties, tokens=int(ended_s)), ended_s)
        for duty in sorted(intake.fleet.alive["honest"].duties):
            intake.fleet.release(intake.fleet.alive["honest"], duty)  # the honest worker has room
            intake._leasing.drop(duty.sample_id, "reward_error")
        sent = [(to, each) for to, each in intake.tick(ended_s) if isinstance(each, Abort)]  # type: ignore[misc]
    assert sent == [("hog", Abort(LEARNER, tuple(held)))]
    assert 800.0 < ended_s <= 910.0, "an eighth and a tick later at most"
    assert not intake.fleet.alive["hog"].gets_leases
    assert intake.fleet.statistics(0.0).set_aside == 1


def test_samples_within_the_limit_of_their_episode_stay() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60", "rollout.episode.timeout_s=740")
    held = duties_of(intake.handle("slow", _hello("slow"), 0.0), "slow")
    for second in range(10, 800, 10):
        intake.handle("slow", heartbeat(intake.fleet.alive["slow"].duties, tokens=second), float(second))
        assert intake.tick(float(second)) == []
    assert intake.fleet.alive["slow"].duties == set(held)


def test_a_worker_without_room_gets_no_evaluation_samples() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    prompts = [Prompt(0, index, (1, 2), Item("?")) for index in range(4)]
    evaluation = Evaluation([EvalSet("held-out", prompts)], lambda record: None)
    intake.evaluation = intake._leasing.evaluation = evaluation
    intake.handle("watcher", _hello("watcher", capacity=0), 0.0)
    intake.handle("honest", _hello("honest", capacity=1), 0.0)
    sent = intake.evaluate()
    assert (len(duties_of(sent, "watcher")), len(duties_of(sent, "honest"))) == (0, 4)


def test_a_worker_with_new_leases_and_results_is_never_overdue() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60", "rollout.episode.timeout_s=740")
    duties = duties_of(intake.handle("w", _hello("w"), 0.0), "w")
    for second in range(1, 2400):
        intake.handle("w", heartbeat(intake.fleet.alive["w"].duties, tokens=second), float(second))
        if second % 300 == 0:
            duties = duties_of(fail(intake, "w", duties, "episode_error", now_s=float(second)), "w")
        assert intake.tick(float(second)) == []
    assert intake.fleet.statistics(0.0).set_aside == 0


def _evaluating(num_prompts: int) -> tuple[Intake, list[Duty]]:
    """Return an intake, and the evaluation samples of its worker, which got all of them at once at time 0."""
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60", "rollout.episode.timeout_s=740")
    prompts = [Prompt(0, index, (1, 2), Item("?")) for index in range(num_prompts)]
    evaluation = Evaluation([EvalSet("held-out", prompts)], lambda record: None)
    intake.evaluation = intake._leasing.evaluation = evaluation
    intake.handle("w", _hello("w"), 0.0)
    return intake, [duty for duty in duties_of(intake.evaluate(), "w") if duty.purpose == "eval"]


def test_a_worker_with_a_long_evaluation_is_not_overdue() -> None:
    """It answers a sample every 500 s, and the last waits for its turn for 5,000 s."""
    intake, waiting = _evaluating(10)
    for second in range(10, 5000, 10):
        intake.handle("w", heartbeat(intake.fleet.alive["w"].duties, tokens=second), float(second))
        if second % 500 == 0:
            fail(intake, "w", [waiting.pop(0)], "episode_timeout", now_s=float(second))
            training = [duty for duty in intake.fleet.alive["w"].duties if duty.purpose == "train"]
            fail(intake, "w", training, "reward_unavailable", now_s=float(second))
        intake.tick(float(second))
    assert intake.fleet.statistics(0.0).set_aside == 0


def test_a_worker_that_answers_all_but_the_evaluation_is_overdue() -> None:
    intake, held = _evaluating(2)
    sent: list[Outgoing] = []
    for second in range(10, 2000, 10):
        intake.handle("w", heartbeat(intake.fleet.alive["w"].duties, tokens=second), float(second))
        training = [duty for duty in intake.fleet.alive["w"].duties if duty.purpose == "train"]
        fail(intake, "w", training, "reward_unavailable", now_s=float(second))
        sent += [each for each in intake.tick(float(second)) if isinstance(each.message, Abort)]
    assert intake.fleet.statistics(0.0).set_aside >= 1
    assert set(held) <= {duty for each in sent for duty in each.message.duties}  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["reconnects", "loses", "goes"])
def test_coming_anew_does_not_make_samples_younger(how: str) -> None:
    """Neither the samples that the worker goes on with, nor those that it gets in place of lost ones."""
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60", "rollout.episode.timeout_s=740")
    intake.handle("hog", _hello("hog"), 0.0)
    second = 0
    while intake.fleet.statistics(0.0).set_aside == 0:
        second += 1
        assert second < 1000
        intake.handle("hog", heartbeat(intake.fleet.alive["hog"].duties, tokens=second), float(second))
        if second % 400 == 0:
            hog = intake.fleet.alive["hog"]
            if how == "reconnects":
                intake._remove(hog)
            elif how == "goes":
                intake.handle("hog", Goodbye(LEARNER, Work()), float(second))
            told = hog.duties if how == "reconnects" else ()
            intake.handle("hog", _hello("hog", duties=sorted(told)), float(second))
        intake.tick(float(second))
    assert second > 780


# -- coming and going --------------------------------------------------------------------------------------------------


def test_coming_again_does_not_end_the_time_without_leases() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    intake.handle("good", _hello("good"), 0.0)
    bad = duties_of(intake.handle("bad", _hello("bad"), 0.0), "bad")
    for _ in range(LAST_OUTCOMES // 2):
        bad = duties_of(fail(intake, "bad", bad), "bad")
    assert intake.fleet.statistics(0.0).set_aside == 1
    intake.handle("bad", Goodbye(LEARNER, Work()), 1.0)
    for incarnation in ("1", "2"):
        peer = "bad" if incarnation == "1" else "bad again"
        intake.handle(peer, _hello("bad", incarnation), 2.0)
        assert duties_of(intake.tick(3.0), peer) == []
        intake.handle(peer, Goodbye(LEARNER, Work()), 4.0)
    assert SET_ASIDE_S > 4.0


def test_a_worker_that_fails_while_others_restart_is_set_aside_once() -> None:
    intake = make_intake(make_offers(), *TWO_GROUPS)
    intake.handle("good", _hello("good"), 0.0)
    bad = duties_of(intake.handle("bad", _hello("rollout-0"), 0.0), "bad")
    intake.handle("good", Goodbye(LEARNER, Work()), 1.0)
    for _ in range(LAST_OUTCOMES):
        bad = duties_of([*fail(intake, "bad", bad), *intake.tick(1.0)], "bad")
    assert bad == []
    assert intake.fleet.statistics(0.0).set_aside == 1
    intake.handle("bad", heartbeat(intake.fleet.alive["rollout-0"].duties, tokens=1), 300.0)
    bad = duties_of(intake.tick(300.0), "bad")  # the other is gone for good
    with pytest.raises(UserError, match="got no reward"):
        for _ in range(LAST_OUTCOMES):
            bad = duties_of([*fail(intake, "bad", bad), *intake.tick(300.0)], "bad")


@pytest.mark.parametrize(("num_expected", "num_strangers"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_strangers_that_come_first_do_not_end_the_run(num_expected: int, num_strangers: int) -> None:
    """The expected workers still load."""
    intake = make_intake(make_offers(), *TWO_GROUPS, f"rollout.num_workers={num_expected}")
    for name in (f"rollout-{num_expected + index}" for index in range(num_strangers)):
        duties = duties_of(intake.handle(name, _hello(name), 0.0), name)
        for _ in range(LAST_OUTCOMES):
            duties = duties_of([*fail(intake, name, duties), *intake.tick(1.0)], name)
    assert intake.fleet.statistics(0.0).set_aside == num_strangers


@pytest.mark.parametrize("name", ["rollout-0", "a name of the user's own"])
def test_rewards_that_fail_at_a_lone_worker_end_the_run(name: str) -> None:
    """At once, or after the five minutes of the expected workers."""
    intake = make_intake(make_offers(), *TWO_GROUPS)
    duties = duties_of(intake.handle("peer", _hello(name), 0.0), "peer")
    ends_s = 0.0 if name == "rollout-0" else 310.0
    with pytest.raises(UserError, match="got no reward"):
        for second in range(0, 400, 10):
            work = heartbeat(intake.fleet.alive[name].duties, tokens=second)
            intake.handle("peer", work, float(second))
            duties = [*duties, *duties_of(intake.tick(float(second)), "peer")]
            for _ in range(LAST_OUTCOMES):
                duties = duties_of(fail(intake, "peer", duties, now_s=float(second)), "peer") if duties else []
    assert ends_s - 10.0 <= second <= ends_s


def test_the_first_worker_to_come_cannot_end_the_run() -> None:
    """One of eight hosts lacks a package of the rewards, and the others still load."""
    intake = make_intake(make_offers(), *ONE_GROUP, "rollout.num_workers=8")
    bad = duties_of(intake.handle("bad", _hello("bad"), 0.0), "bad")
    for _ in range(LAST_OUTCOMES):
        bad = duties_of([*fail(intake, "bad", bad), *intake.tick(1.0)], "bad")
    assert bad == []
    assert intake.fleet.statistics(0.0).set_aside == 1
    assert len(duties_of(intake.handle("good", _hello("good"), 2.0), "good")) == 2


def test_a_worker_set_aside_does_not_go_on_with_its_samples() -> None:
    """Its Hello crosses the message that cancels them; a checkpoint counts no attempt less than none."""
    intake = make_intake(make_offers(), *TWO_GROUPS)
    intake.handle("good", _hello("good", capacity=1), 0.0)
    duties = duties_of(intake.handle("bad", _hello("bad"), 0.0), "bad")
    intake.fleet.set_aside(intake.fleet.alive["bad"], 0.0, "a test")
    intake._take_duties(intake.fleet.alive["bad"], is_attempt=False)
    sent = intake.handle("bad", _hello("bad", duties=duties), 0.1)
    assert Outgoing("bad", Abort(LEARNER, tuple(duties))) in sent
    assert intake.fleet.alive["bad"].duties == set()


@pytest.mark.parametrize("is_attempt", [True, False])
def test_an_attempt_counts_once_however_often_the_holder_comes_back(is_attempt: bool) -> None:
    sample = Sample()
    sample.lease(Grant(1, "w", 0))
    for _ in range(5):
        assert sample.lose(1, is_attempt=is_attempt)
        assert sample.num_attempts == is_attempt
        assert sample.adopts(1, "w")
        assert sample.num_attempts == 0


def test_each_time_without_leases_is_twice_as_long() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    intake.handle("good", _hello("good"), 0.0)
    intake.handle("bad", _hello("bad"), 0.0)
    bad, now_s = intake.fleet.alive["bad"], 0.0
    for times in (1, 2, 4, 8, 16, 16):
        intake.fleet.set_aside(bad, now_s, "a test")
        intake.fleet.try_again(now_s + times * SET_ASIDE_S - 1.0)
        assert not bad.gets_leases
        now_s += times * SET_ASIDE_S
        intake.fleet.try_again(now_s)
        assert bad.gets_leases


@pytest.mark.parametrize("goes", [True, False])
def test_losing_leases_in_a_loop_gets_new_leases_once_a_tick(goes: bool) -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    duties = duties_of(intake.handle("loop", _hello("loop"), 0.0), "loop")
    assert len(duties) == 2
    for _ in range(100):
        if goes:
            intake.handle("loop", Goodbye(LEARNER, Work()), 0.0)
        assert duties_of(intake.handle("loop", _hello("loop"), 0.0), "loop") == []
    assert [duty.sample_id for duty in duties_of(intake.tick(0.25), "loop")] == [duty.sample_id for duty in duties]


def test_no_worker_alone_uses_up_the_attempts_of_a_sample() -> None:
    """The last attempt is another worker's, even if this worker has no room yet."""
    intake = make_intake(make_offers(), *TWO_GROUPS)
    kept = duties_of(intake.handle("honest", _hello("honest"), 0.0), "honest")
    lost = duties_of(intake.handle("bad", _hello("bad"), 0.0), "bad")
    for turn in range(10):
        intake.handle("bad", Goodbye(LEARNER, Work(), failed=True), float(turn))
        intake.handle("bad", _hello("bad"), float(turn))
        intake.tick(float(turn))
    assert intake.statistics().ledger.dropped == {}
    assert duties_of(fail(intake, "honest", kept), "honest") == [
        Duty(intake.fleet.alive["honest"].newest_lease, *duty.sample_id) for duty in lost
    ]


def test_samples_that_wait_for_another_worker_take_no_room() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "learner.groups_per_step=3", "wire.max_attempts=2")
    intake.handle("full", _hello("full"), 0.0)
    lost = duties_of(intake.handle("twice", _hello("twice"), 0.0), "twice")
    intake.handle("twice", Goodbye(LEARNER, Work(), failed=True), 1.0)
    intake.handle("twice", _hello("twice"), 1.0)
    again = duties_of(intake.tick(1.0), "twice")
    assert len(again) == 2
    assert {duty.sample_id for duty in lost}.isdisjoint(duty.sample_id for duty in again)


def test_a_sample_is_dropped_with_the_reason_of_the_last_attempt() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=2")
    names = ("first", "second")
    duties = duties_of(intake.handle("first", _hello("first"), 0.0), "first")
    intake.handle("second", _hello("second"), 0.0)
    again = fail(intake, "first", duties, "reward_unavailable")
    assert [len(duties_of(again, name)) for name in names] == [0, 2]
    fail(intake, "second", duties_of(again, "second"), "reward_unavailable")
    assert intake.statistics().ledger.dropped == {"reward_unavailable": 2}


def test_a_process_keeps_the_name_of_its_first_hello() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    intake.handle("peer", _hello("first"), 0.0)
    for leaves in (False, True):
        if leaves:
            intake.handle("peer", Goodbye(LEARNER, Work()), 0.0)
        (refused,) = [each for _, each in intake.handle("peer", _hello("second"), 0.0) if isinstance(each, Refusal)]
        assert "this process is first" in refused.detail
    assert intake.fleet.alive == {}
    assert intake.fleet.statistics(0.0).refused_workers == {"another_name": 2}


# -- work for the learner ----------------------------------------------------------------------------------------------


def test_duties_that_were_never_granted_are_lies() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    intake.handle("honest", _hello("honest"), 0.0)
    intake.handle("liar", _hello("liar"), 0.0)
    sent = intake.handle("liar", _hello("liar", duties=[Duty(10**6 + number, 0, 0) for number in range(10**5)]), 0.0)
    assert [type(message) for to, message in sent if to == "liar"] == [Refusal]
    assert intake.lies.statistics().refused_answers == {"no_such_lease": 8}
    assert list(intake.fleet.alive) == ["honest"]


def test_invented_failures_are_read_until_the_liar_is_cut_off() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    intake.handle("liar", _hello("liar"), 0.0)
    fail(intake, "liar", [Duty(10**6 + number, 0, 0) for number in range(10**5)])
    assert intake.lies.statistics().refused_answers == {"no_such_lease": 8}
    assert intake.statistics().ledger.dropped == {}


def test_all_duties_are_compared_for_few_heartbeats_of_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    assert isinstance(intake.handle("w", _hello("w"), 0.0)[0].message, Welcome)
    wrong = Heartbeat(LEARNER, 2, MOST_COUNT, b"another", 0, 0, receiving=False, work=Work())
    told = []
    for number in range(1000):
        (reply,) = intake.handle("w", wrong, number / 1000)
        assert isinstance(reply.message, HeartbeatReply)
        told.append(reply.message.say_hello)
    assert told.index(True) == 0
    assert sum(told) == pytest.approx(4 / CONFIG.wire.heartbeat_s, abs=1)
