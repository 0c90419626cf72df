"""Answers are held against their leases: a worker that lies in any field costs only its own samples."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.intakes import LEARNER, ONE_GROUP, VOCAB_SIZE, duties_of, make_intake, make_offers

from areal_rloo.config import load_config
from areal_rloo.errors import DecodeError
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Grant
from areal_rloo.intake.prompts import Prompt, PromptStream
from areal_rloo.intake.saved_ledger import ledger_of, ledger_state
from areal_rloo.tasks import Source
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.codec import decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Ack, Duty, Failed, Finished, Hello, Partial, Partials, Results, Work
from areal_rloo.wire.turns import RecordedTurn, encode_turns

PROMPT = (1, 2)
MOST_TOKENS = load_config("quickstart.yaml").context_tokens


def _hello(worker_id: str = "w", incarnation: str = "1", *, capacity: int = 2) -> Hello:
    return Hello(worker_id, incarnation, capacity, 0, None, 1, 0, (), Work())


def _answer(
    duty: Duty,
    *,
    prompt: Sequence[int] = PROMPT,
    tokens: Sequence[int] = (3, 4),
    versions: Sequence[int] | None = None,
    spans: tuple[int, ...] = (),
) -> Trajectory:
    num = len(tokens)
    completion = Completion(
        np.array(tokens, np.int32),
        np.full(num, -1.0, np.float32),
        np.array(versions or [0] * num, np.int32),
        "stop",
        spans,
    )
    return Trajectory(duty.group_id, duty.sample_index, np.array(prompt, np.int32), completion, 1.0)


def _results(*finished: Finished, failed: Sequence[Failed] = ()) -> wire.WorkerMessage:
    """Results as they arrive: with what the codec notes."""
    return decode_worker(encode(Results(LEARNER, 7, finished, tuple(failed))), Limits())


def _honest(duty: Duty) -> Finished:
    return Finished(duty.lease_id, (_answer(duty),))


def _refused(intake: Intake) -> dict[str, int]:
    return intake.lies.statistics().refused_answers


def _counts_as_nothing(intake: Intake) -> bool:
    counts = intake.statistics().ledger
    return counts.balanced and counts.buffered == 0 and not counts.dropped


Spoil = Callable[[Duty], tuple[Trajectory, ...]]
LIES: list[tuple[str, Spoil]] = [
    ("versions", lambda duty: (_answer(duty, versions=(0, 1)),)),
    ("versions", lambda duty: (_answer(duty, versions=(1_000_000, 1_000_000)),)),
    ("vocabulary", lambda duty: (_answer(duty, tokens=(3, VOCAB_SIZE)),)),
    ("vocabulary", lambda duty: (_answer(duty, prompt=(1, VOCAB_SIZE)),)),
    ("prompt", lambda duty: (_answer(duty, prompt=(1, 3)),)),
    ("prompt", lambda duty: (_answer(duty, prompt=(1, 2, 3)),)),
    ("length", lambda duty: (_answer(duty, tokens=[3] * MOST_TOKENS),)),
    ("shape", lambda duty: (_answer(duty), _answer(duty))),
    ("shape", lambda duty: (_answer(duty, tokens=(3, 4, 5), spans=(1, 1, 1)),)),
]


@pytest.mark.parametrize(("kind", "spoil"), LIES)
def test_a_lie_costs_its_own_sample_and_the_sample_goes_elsewhere(intake: Intake, kind: str, spoil: Spoil) -> None:
    first, second = duties_of(intake.handle("liar", _hello("liar"), 0.0))
    intake.handle("other", _hello("other", capacity=9), 0.0)
    sent = intake.handle("liar", _results(Finished(first.lease_id, spoil(first)), _honest(second)), 0.0)
    assert _refused(intake) == {kind: 1}
    assert intake.lies.statistics().refused_by_worker == {"liar": 1}
    assert [duty.sample_id for duty in duties_of(sent, "other")] == [first.sample_id]
    assert intake.statistics().ledger.buffered == 1
    intake.handle("other", _results(_honest(duties_of(sent, "other")[0])), 0.0)
    batch = intake.take_batch()
    assert batch is not None and [t.completion.tokens.tolist() for t in batch[0].trajectories] == [[3, 4], [3, 4]]


def test_a_version_below_the_lease_s_is_refused() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP)
    duties = duties_of(intake.handle("w", _hello(), 0.0))
    intake.handle("w", _results(*map(_honest, duties)), 0.0)
    assert intake.take_batch() is not None
    (old, _) = duties_of(intake.commit(1, evaluate=False))
    intake.handle("w", _results(Finished(old.lease_id, (_answer(old, versions=(0, 1)),))), 0.0)
    assert _refused(intake) == {"versions": 1}


def test_the_tokens_of_a_partial_rollout_may_be_older_than_the_lease() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "algorithm.max_staleness=1")
    duties = duties_of(intake.handle("first", _hello("first", capacity=4), 0.0))
    intake.handle("first", _results(*map(_honest, duties[:2])), 0.0)
    assert intake.take_batch() is not None
    intake.commit(1, evaluate=False)
    turn = _answer(duties[2]).completion
    partials = tuple(Partial(*duty, encode_turns([RecordedTurn(b"", turn)])) for duty in duties[2:])
    intake.handle("first", Partials(LEARNER, 0, partials, True), 0.0)
    intake.handle("first", wire.Goodbye(LEARNER, Work()), 0.0)
    again = [duty for duty in duties_of(intake.handle("w", _hello(capacity=2), 0.0)) if duty.group_id == 1]
    answers = (Finished(duty.lease_id, (_answer(duty, versions=(0, 1)),)) for duty in again)
    intake.handle("w", _results(*answers), 0.0)
    assert (_refused(intake), len(again)) == ({}, 2)
    assert intake.statistics().ledger.buffered == 2


def test_another_worker_s_sample_is_refused_and_stays_with_its_holder(intake: Intake) -> None:
    duties = duties_of(intake.handle("w", _hello(), 0.0))
    intake.handle("liar", _hello("liar"), 0.0)
    intake.handle("liar", _results(_honest(duties[0])), 0.0)
    intake.handle("liar", _results(failed=[Failed(*duties[1], "reward_error", "no", "", 3)]), 0.0)
    assert _refused(intake) == {"not_the_holder": 2}
    assert _counts_as_nothing(intake)
    intake.handle("w", _results(*map(_honest, duties)), 0.0)
    assert intake.statistics().ledger.buffered == 2


@pytest.mark.parametrize(
    "duty",
    [
        Duty(1, 10**12, 0),
        Duty(99, 0, 0),
        Duty(0, 0, 0),
        Duty(1, -7, 0),
        Duty(1, -(2**43), 0),
        Duty(1, 99, 5),
        Duty(1, 1, 0),
        Duty(2, 0, 0),
    ],
)
def test_failures_of_samples_that_never_were_end_no_run(intake: Intake, duty: Duty) -> None:
    intake.handle("w", _hello(), 0.0)
    for _ in range(400):
        intake.handle("w", _results(failed=[Failed(*duty, "reward_error", "no", "", 3)]), 0.0)
    assert _refused(intake) == {"no_such_lease": 8}  # then the process is cut off
    assert _counts_as_nothing(intake)


def test_the_same_sample_twice_in_one_message_counts_once(intake: Intake) -> None:
    first, _ = duties_of(intake.handle("w", _hello(), 0.0))
    intake.handle("w", _results(_honest(first), _honest(first)), 0.0)
    counts = intake.statistics()
    assert (counts.ledger.buffered, counts.repeated_results, _refused(intake)) == (1, 1, {})


def test_late_results_and_repeats_are_no_lies(intake: Intake) -> None:
    duties = duties_of(intake.handle("w", _hello(), 0.0))
    for _ in range(20):
        intake.handle("w", _results(*map(_honest, duties)), 0.0)
    assert _refused(intake) == {}
    assert intake.take_batch() is not None
    intake.commit(1, evaluate=False)
    intake.handle("w", _results(*map(_honest, duties)), 0.0)
    assert _refused(intake) == {}


def test_a_worker_that_lies_often_is_cut_off_and_its_next_process_is_not(intake: Intake) -> None:
    intake.handle("liar", _hello("liar"), 0.0)
    sent: list[Outgoing] = []
    for _ in range(8):
        sent = intake.handle("liar", _results(_honest(Duty(99, 0, 0))), 0.0)
    assert [type(message) for _, message in sent] == [Ack, wire.Refusal]
    assert intake.statistics().num_workers == 0
    assert intake.lies.statistics().cut_off == 1
    ((_, refusal),) = intake.handle("liar", _hello("liar"), 0.0)
    assert isinstance(refusal, wire.Refusal) and refusal.final
    assert intake.handle("liar", _results(_honest(Duty(1, 0, 0))), 0.0) == []
    intake.handle("liar again", _hello("liar", "2"), 0.0)
    assert len(duties_of(intake.tick(0.1))) == 2


def test_a_lone_worker_may_try_a_refused_sample_again(intake: Intake) -> None:
    first, _ = duties_of(intake.handle("w", _hello(), 0.0))
    sent = intake.handle("w", _results(Finished(first.lease_id, (_answer(first, versions=(5, 5)),))), 0.0)
    assert [duty.sample_id for duty in duties_of(sent)] == [first.sample_id]


def test_a_stranger_that_never_said_hello_changes_nothing(intake: Intake) -> None:
    duties = duties_of(intake.handle("w", _hello(), 0.0))
    assert intake.handle("stranger", _results(*map(_honest, duties)), 0.0) == []
    assert intake.handle("stranger", wire.Goodbye(LEARNER, Work(5.0, 10**15)), 0.0) == []
    assert intake.statistics().generated_tokens == 0
    assert _counts_as_nothing(intake)


def test_a_worker_adopts_no_duty_of_another(intake: Intake) -> None:
    duties = duties_of(intake.handle("w", _hello(), 0.0))
    intake.tick(1000.0)  # the worker is taken for dead
    claim = Hello("liar", "1", 0, 0, LEARNER, 1, 99, tuple(duties), Work())
    intake.handle("liar", claim, 1000.0)
    intake.handle("liar", _results(*map(_honest, duties)), 1000.0)
    assert _refused(intake) == {"not_the_holder": 2}


def _poisoned(*, token: int = 3, logprob: float = -1.0, versions: Sequence[tuple[int, int]] = ((0, 2),)) -> bytes:
    """A partial rollout of two tokens that no encoder makes."""
    tokens, logprobs = np.full(2, token, "<i4"), np.full(2, logprob, "<f4")
    return msgspec.msgpack.encode([[b"", tokens.tobytes(), logprobs.tobytes(), versions, "abort"]])


PARTIALS = [
    ("unreadable", _poisoned(logprob=5.0)),
    ("unreadable", _poisoned(logprob=-1e38)),
    ("unreadable", _poisoned(logprob=float("nan"))),
    ("unreadable", _poisoned(token=-1)),
    ("unreadable", _poisoned(versions=((-1, 1), (0, 1)))),
    ("unreadable", _poisoned(versions=((0, 1), (0, 1)))),
    ("unreadable", b"\x91" * 1000),
    ("versions", encode_turns([RecordedTurn(b"", _answer(Duty(1, 0, 0), versions=(3, 3)).completion)])),
    ("vocabulary", encode_turns([RecordedTurn(b"", _answer(Duty(1, 0, 0), tokens=(VOCAB_SIZE, 1)).completion)])),
    ("length", encode_turns([RecordedTurn(b"", _answer(Duty(1, 0, 0), tokens=[1] * (MOST_TOKENS + 1)).completion)])),
    ("length", encode_turns([RecordedTurn(b"", _answer(Duty(1, 0, 0)).completion)] * (MOST_TOKENS // 2 + 1))),
    ("unreadable", encode_turns([RecordedTurn(bytes(17), _answer(Duty(1, 0, 0)).completion)])),
]


@pytest.mark.parametrize(("kind", "turns"), PARTIALS)
def test_a_lie_in_a_partial_rollout_is_not_kept(intake: Intake, kind: str, turns: bytes) -> None:
    duties = duties_of(intake.handle("w", _hello(), 0.0))
    intake.handle("w", Partials(LEARNER, 0, (Partial(*duties[0], turns),), True), 0.0)
    assert _refused(intake) == {kind: 1}
    assert intake.ledger.groups[0].samples[0].partial == b""
    intake.handle("w", _results(*map(_honest, duties)), 0.0)
    assert intake.statistics().ledger.buffered == 2


@pytest.mark.parametrize("kind", ["agent", "some.module:Episode"])
def test_an_agent_and_a_user_s_episode_choose_their_prompts(kind: str) -> None:
    agent = ("rollout.episode.agent=support.agents_to_train:right",) if kind == "agent" else ()
    intake = make_intake(make_offers(), *ONE_GROUP, f"rollout.episode.type={kind}", *agent)
    first, second = duties_of(intake.handle("w", _hello(), 0.0))
    several = Finished(first.lease_id, (_answer(first, prompt=(9,)), _answer(first, prompt=(8, 7))))
    intake.handle("w", _results(several, Finished(second.lease_id, (_answer(second, versions=(9, 9)),))), 0.0)
    assert _refused(intake) == {"versions": 1}
    assert intake.statistics().ledger.buffered == 1


@pytest.mark.parametrize("kind", ["agent, agent: support.agents_to_train:right", "some.module:Episode"])
def test_a_sample_of_an_agent_has_limited_trajectories(kind: str) -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, f"rollout.episode={{type: {kind}, max_trajectories: 3}}")
    first, second = duties_of(intake.handle("w", _hello(), 0.0))
    as_many, too_many = (Finished(duty.lease_id, (_answer(duty),) * num) for duty, num in ((first, 3), (second, 4)))
    intake.handle("w", _results(as_many, too_many), 0.0)
    assert _refused(intake) == {"shape": 1}
    assert intake.statistics().ledger.buffered == 1


def test_the_prompt_of_another_group_is_a_lie_although_it_travels_once() -> None:
    prompts = iter([(1, 2), (5, 6)])
    stream = PromptStream([Source("all", [Item("a"), Item("b")])], lambda *_: next(prompts), seed=0, num_epochs=None)
    intake = make_intake(make_offers(), *ONE_GROUP, "learner.groups_per_step=2", stream=stream)
    duties = duties_of(intake.handle("w", _hello(capacity=4), 0.0))
    right = [Finished(duty.lease_id, (_answer(duty),)) for duty in duties]
    intake.handle("w", _results(*right), 0.0)
    assert _refused(intake) == {"prompt": 2}


def test_a_prompt_that_travels_once_counts_in_every_length(intake: Intake) -> None:
    first, second = duties_of(intake.handle("w", _hello(), 0.0))
    tokens = [3] * (MOST_TOKENS - 1)  # with the prompt of two tokens, one too many
    right = Finished(first.lease_id, (_answer(first, tokens=tokens[1:]),))
    intake.handle("w", _results(right, Finished(second.lease_id, (_answer(second, tokens=tokens),))), 0.0)
    assert _refused(intake) == {"length": 1}


SPANS = [
    *(("single_turn", "null", 3, True), ("multi_turn", "null", 3, False), ("multi_turn", "null", 2, True)),
    *(("some.module:Episode", "null", 2, False), ("single_turn", "{type: multi_turn}", 3, False)),
]


@pytest.mark.parametrize(("kind", "of_source", "num_spans", "is_lie"), SPANS)
def test_the_policy_has_the_last_word(kind: str, of_source: str, num_spans: int, is_lie: bool) -> None:
    episodes = (f"rollout.episode.type={kind}", f"data.train.episode={of_source}")
    lies = make_intake(make_offers(), *ONE_GROUP, *episodes).lies
    answer = _answer(Duty(1, 0, 0), tokens=[3] * num_spans, spans=(1,) * num_spans)
    prompt, results = Prompt(0, 0, PROMPT, Item("?")), _results(Finished(1, (answer,)))
    assert isinstance(results, Results)
    assert lies.in_trajectories([answer], Grant(1, "w", 0), prompt, 0) == ("shape" if is_lie else None)
    assert (lies.lowest_plain_version(results, 0, {0: prompt}.get) is None) == is_lie


@given(data=st.data())
def test_a_look_at_all_answers_finds_what_a_look_at_each_finds(data: st.DataObject) -> None:
    """Decoded messages carry extremes, for a fast look; without them, each answer is looked at."""
    tokens = st.lists(st.integers(0, VOCAB_SIZE), min_size=1, max_size=4)
    answer = st.tuples(tokens, st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 2), st.integers(1, 2))
    answers = data.draw(st.lists(answer, max_size=4))
    kind = data.draw(st.sampled_from(["single_turn", "multi_turn", "some.module:Episode, max_trajectories: 1"]))
    lies = make_intake(make_offers(), *ONE_GROUP, f"rollout.episode={{type: {kind}}}").lies
    prompts = {number: Prompt(0, 0, tokens, Item("?")) for number, tokens in enumerate([PROMPT, (1,)])}
    finished = []
    for ids, version, is_right, has_spans, group_id, num in answers:
        spans = tuple([1] * len(ids)) if has_spans else ()
        tokens_of = prompts.get(group_id, prompts[0]).tokens if is_right else (7, 7)
        duty, versions = Duty(1, group_id, 0), [version] * len(ids)
        made = [_answer(duty, tokens=ids, prompt=tokens_of, versions=versions, spans=spans)] * num
        finished.append(Finished(1, tuple(made)))
    results = _results(*finished)
    assert isinstance(results, Results)
    newest, grant = data.draw(st.integers(0, 3)), Grant(1, "w", data.draw(st.integers(0, 3)))
    lowest = lies.lowest_plain_version(results, newest, prompts.get)
    slow = []
    for each in results.finished:
        prompt = prompts.get(each.trajectories[0].group_id)
        slow.append(prompt and lies.in_trajectories(each.trajectories, grant, prompt, newest))
    if lowest is not None and lowest >= grant.min_version:
        assert set(slow) <= {None}
    elif lowest is None and results.finished:
        known = all(each.trajectories[0].group_id in prompts for each in results.finished)
        assert not known or set(slow) != {None}, "a look at all answers finds a lie that a look at each does not"


def _heartbeat(work: Work) -> wire.Heartbeat:
    return wire.Heartbeat(LEARNER, 2, 0, wire.digest([]), 0, 0, False, work)


def test_counts_of_workers_never_go_backwards(intake: Intake) -> None:
    intake.handle("w", Hello("w", "1", 0, 0, None, 1, 0, (), Work(5.0, 100)), 0.0)
    for work in (Work(8.0, 300), Work(0.0, 0), Work(6.0, 250), Work(8.0, 300)):
        intake.handle("w", _heartbeat(work), 0.0)
        assert (intake.statistics().rollout_idle_s, intake.statistics().generated_tokens) == (3.0, 200)


def test_counts_that_do_not_grow_are_no_progress(intake: Intake) -> None:
    intake.handle("w", _hello(), 0.0)
    for now_s, num_tokens in enumerate((0, 7, 0, 7, 2**53, 7), start=1):
        intake.handle("w", _heartbeat(Work(0.0, num_tokens)), float(now_s))
    assert intake.fleet.alive["w"].progress_s == 2.0


def test_claims_of_many_workers_fit_a_checkpoint(intake: Intake) -> None:
    for number in range(1100):
        peer, most = f"{number:04x}", Work(1e12, 2**53, 1e12, 1e12)
        intake.handle(peer, Hello(peer, "1", 0, None, None, 1, 0, (), Work()), 0.0)
        for tenth in range(1, 11):
            intake.handle(peer, _heartbeat(Work(1e6 * tenth, 10**12 * tenth, 1e6 * tenth, 1e11 * tenth)), 0.0)
        intake.handle(peer, wire.Goodbye(LEARNER, most), 0.0)
    statistics = intake.statistics()
    assert statistics.generated_tokens == 2**53  # the most that the state of a checkpoint can have
    for seconds in (statistics.rollout_idle_s, statistics.rollout_busy_s, statistics.decoding_s):
        assert 0 < seconds <= 1e12


def test_reasons_of_failures_are_limited_over_the_resumes_of_a_run() -> None:
    options = (*ONE_GROUP, "rollout.max_reward_failure_share=0.9")
    letters = [f"{a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    ledger = make_intake(make_offers(), *options).ledger
    for run in ("first", "second"):
        intake = make_intake(make_offers(), *options, ledger=ledger)
        duties = duties_of(intake.handle("w", _hello(), 0.0))
        for word in letters:
            failed = Failed(*duties[0], f"{run}_{word}", "no", "", 3)
            duties = duties_of(intake.handle("w", _results(_honest(duties[1]), failed=[failed]), 0.0))
        groups = intake.ledger.groups
        ledger = ledger_of(ledger_state(intake.ledger), {name: group.prompt for name, group in groups.items()}, {})
    counts = ledger.counts()
    assert counts.balanced
    assert counts.dropped["first_aa"] == 1
    assert (counts.dropped["group_too_small"], counts.dropped["other"], len(counts.dropped)) == (200, 142, 60)
    failed = Failed(*duties[0], "reward_error", "no", "", 3)
    intake.handle("w", _results(failed=[failed]), 0.0)
    assert intake.ledger.counts().dropped["reward_error"] == 1, "a crowd of words leaves the usual reasons their labels"


def test_a_reason_with_a_line_break_is_unreadable() -> None:
    for reason in ("bad\n", "bad\nworse", ""):
        with pytest.raises(DecodeError, match="regex"):
            _results(failed=[Failed(1, 0, 0, reason, "no", "", 3)])


def test_times_of_workers_never_go_backwards_nor_jump(intake: Intake) -> None:
    intake.handle("w", Hello("w", "1", 0, 0, None, 1, 0, (), Work(5.0, 100, 1.0, 16.0)), 0.0)
    for work in (Work(8.0, 300, 3.0, 48.0), Work(0.0, 0, 0.0, 0.0), Work(8.0, 300, 2e7, 2e11)):
        intake.handle("w", _heartbeat(work), 0.0)
        statistics = intake.statistics()
        assert (statistics.rollout_busy_s, statistics.decoding_s) == (2.0, 32.0)
