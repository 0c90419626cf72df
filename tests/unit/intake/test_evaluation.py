"""Evaluation: every held-out prompt once, a single evaluation at a time, with the right version."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.errors import DataError
from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.ledger import Grant
from areal_rloo.intake.prompts import Prompt
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.messages import Lease

PROMPTS = [Prompt(0, index, (index + 1,), Item(f"{index}?")) for index in range(5)]


def _leases(evaluation: Evaluation) -> list[Lease]:
    """Lease everything that waits."""
    leases = []
    for group_id, prompt, indices in evaluation.take_waiting():
        for index in indices:
            sample = evaluation.sample((group_id, index))
            assert sample is not None
            sample.lease(Grant(1, "w", 0))
        version, seed = evaluation.policy_version, evaluation.seed(group_id)
        leases.append(Lease(1, group_id, indices, prompt.tokens, prompt.item, version, seed))
    return leases


def _lose(evaluation: Evaluation, lease: Lease, index: int = 0) -> None:
    sample = evaluation.sample((lease.group_id, index))
    assert sample is not None
    sample.lose(1, is_attempt=True)
    evaluation.wait_again((lease.group_id, index))


def test_a_sample_lost_twice_before_it_is_leased_again_is_leased_once() -> None:
    """Its holder came back, went on with the sample, and left, all while no worker got leases."""
    evaluation = Evaluation([EvalSet("arithmetic", PROMPTS[:1])], lambda record: None)
    evaluation.request(5)
    (lease,) = _leases(evaluation)
    _lose(evaluation, lease)
    sample = evaluation.sample((lease.group_id, 0))
    assert sample is not None and sample.adopts(1, "w")
    _lose(evaluation, lease)
    assert [indices for _, _, indices in evaluation.take_waiting()] == [(0,)]


def _finished(lease: Lease, reward: float, version: int) -> Trajectory:
    completion = Completion(np.zeros(2, np.int32), np.zeros(2, np.float32), np.full(2, version, np.int32), "stop")
    return Trajectory(lease.group_id, 0, np.array(lease.prompt_tokens, np.int32), completion, reward)


def test_accuracy_is_the_share_of_right_samples() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation([EvalSet("arithmetic", PROMPTS[:4])], records.append)
    evaluation.request(5)
    leases = _leases(evaluation)
    assert [lease.prompt_tokens for lease in leases] == [prompt.tokens for prompt in PROMPTS[:4]]
    assert {lease.min_version for lease in leases} == {5}
    for lease, reward in zip(leases, (1.0, 0.0, 1.0, 1.0), strict=True):
        evaluation.finish([_finished(lease, reward, 6)])
    (record,) = records
    assert (record.accuracy, record.num_prompts, record.policy_version) == (0.75, 4, 6)
    assert evaluation.finished


def test_a_version_due_during_an_evaluation_waits_and_the_newest_wins() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation([EvalSet("arithmetic", PROMPTS[:4])], records.append)
    evaluation.request(1)
    first = _leases(evaluation)
    evaluation.request(2)
    evaluation.request(3)
    assert _leases(evaluation) == []
    for lease in first:
        evaluation.finish([_finished(lease, 1.0, 1)])
    second = _leases(evaluation)
    assert {lease.min_version for lease in second} == {3}
    assert not {lease.group_id for lease in first} & {lease.group_id for lease in second}
    assert [lease.prompt_tokens for lease in second] == [prompt.tokens for prompt in PROMPTS[:4]]
    assert [lease.seed for lease in second] == [lease.seed for lease in first]  # only the weights differ
    assert not evaluation.finished


def test_evaluation_handles_lost_and_failed_samples() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation([EvalSet("arithmetic", PROMPTS[:4])], records.append)
    evaluation.request(0)
    leases = _leases(evaluation)
    _lose(evaluation, leases[0])
    assert _leases(evaluation)[0].group_id == leases[0].group_id
    evaluation.fail((leases[0].group_id, 0), 37)
    for lease in leases[1:]:
        evaluation.finish([_finished(lease, 1.0, 0)])
    (record,) = records
    finished = len(_finished(leases[1], 1.0, 0).completion.tokens)
    assert (record.accuracy, record.num_failed) == (0.75, 1)
    assert record.completion_tokens_mean == (37 + 3 * finished) / 4


def test_a_lost_sample_that_arrives_late_is_not_leased_again() -> None:
    evaluation = Evaluation([EvalSet("arithmetic", PROMPTS[:2])], lambda record: None)
    evaluation.request(0)
    first, second = _leases(evaluation)
    _lose(evaluation, first)
    evaluation.finish([_finished(first, 1.0, 0)])
    assert evaluation.sample((first.group_id, 0)) is None
    assert _leases(evaluation) == []
    evaluation.finish([_finished(second, 1.0, 0)])
    assert evaluation.finished


def test_without_held_out_prompts_no_evaluation_is_awaited() -> None:
    evaluation = Evaluation([], lambda record: None)
    evaluation.request(3)
    assert evaluation.finished


def _sampled(lease: Lease, index: int, reward: float, answer: str | None) -> Trajectory:
    trajectory = _finished(lease, reward, 1)
    return msgspec.structs.replace(trajectory, sample_index=index, answer=answer)


def _measured(*samples: list[tuple[float, str | None]]) -> EvalRecord:
    """Return the record of a set with these samples of each prompt."""
    records: list[EvalRecord] = []
    num_samples = len(samples[0])
    evaluation = Evaluation([EvalSet("mine", PROMPTS[: len(samples)], num_samples)], records.append)
    evaluation.request(1)
    for lease, outcomes in zip(_leases(evaluation), samples, strict=True):
        assert lease.sample_indices == tuple(range(num_samples))
        for index, (reward, answer) in enumerate(outcomes):
            evaluation.finish([_sampled(lease, index, reward, answer)])
    return records[0]


def test_pass_at_k_and_maj_at_k_are_shares_of_prompts() -> None:
    record = _measured(
        [(1.0, "4"), (1.0, "4"), (0.0, "5")],  # passes, and the majority is right
        [(1.0, "4"), (0.0, "5"), (0.0, "5")],  # passes, and the majority is wrong
        [(1.0, "4"), (0.0, "6"), (0.0, "6")],  # likewise
        [(0.0, "5"), (0.0, "6"), (0.0, None)],  # neither
        [(1.0, "4"), (0.0, "5"), (0.0, None)],  # passes; one of two that are as frequent is right
    )
    assert (record.num_prompts, record.num_samples) == (5, 3)
    assert record.accuracy == 5 / 15
    assert record.accuracy_error == pytest.approx(math.sqrt(2 / 9 / 4 / 5)), "of 2/3, 1/3, 1/3, 0 and 1/3"
    assert record.pass_share == 4 / 5
    assert record.majority_share == (1 + 0 + 0 + 0 + 0.5) / 5


def test_a_weighted_sum_rounded_to_just_below_1_is_right() -> None:
    record = _measured([(0.7 + 0.2 + 0.1, "4"), (0.0, "5")])
    assert 0.7 + 0.2 + 0.1 < 1
    assert (record.pass_share, record.majority_share) == (1.0, 0.5)


def test_partial_credit_is_a_reward_and_no_accuracy() -> None:
    record = _measured([(1.0, None), (0.5, None)], [(0.5, None), (0.5, None)])
    assert (record.accuracy, record.reward) == (0.25, 0.625)
    assert (record.accuracy_error, record.reward_error) == (0.25, 0.125)
    assert record.result == ("reward", 0.625)
    assert _measured([(1.0, None), (0.0, None)]).result == ("accuracy", 0.5)


@pytest.mark.parametrize("reward", [-0.5, 1.5])
def test_rewards_beyond_0_and_1_say_nothing_of_right_and_wrong(reward: float) -> None:
    record = _measured([(reward, None)], [(1.0, None)])
    assert math.isnan(record.accuracy) and math.isnan(record.accuracy_error)
    assert record.result == ("reward", (reward + 1) / 2)


def test_samples_without_a_final_answer_do_not_vote() -> None:
    record = _measured([(1.0, None), (0.0, None)], [(1.0, "4"), (1.0, "4")])
    assert (record.pass_share, record.majority_share) == (1.0, 0.5)


def test_shares_are_nan_without_final_answers_or_with_one_sample() -> None:
    record = _measured([(1.0, None), (0.0, None)])
    assert record.pass_share == 1.0
    assert math.isnan(record.majority_share)
    record = _measured([(1.0, "4")])
    assert math.isnan(record.pass_share) and math.isnan(record.majority_share)


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from("abc")), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_the_majority_share_is_at_most_the_pass_share(samples: list[list[tuple[float, str | None]]]) -> None:
    record = _measured(*samples)
    assert 0 <= record.majority_share <= record.pass_share <= 1
    assert record.accuracy <= record.pass_share


def test_several_sets_are_evaluated_together_with_a_record_each() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation(
        [EvalSet("a", PROMPTS[:1], 2), EvalSet("b", PROMPTS[1:4]), EvalSet("empty", [])], records.append
    )
    evaluation.request(2)
    leases = _leases(evaluation)
    assert [lease.sample_indices for lease in leases] == [(0, 1), (0,), (0,), (0,)]
    assert len({lease.group_id for lease in leases}) == 4
    _lose(evaluation, leases[0], 1)
    (again,) = _leases(evaluation)
    assert (again.group_id, again.sample_indices, again.seed) == (leases[0].group_id, (1,), leases[0].seed)
    evaluation.request(3)
    for lease in leases[1:]:
        evaluation.finish([_finished(lease, 1.0, 2)])
    assert [record.name for record in records] == ["b"]
    assert not evaluation.finished
    evaluation.finish([_sampled(leases[0], 0, 1.0, None), _sampled(leases[0], 0, 1.0, None)])
    evaluation.fail((leases[0].group_id, 1), 0)
    assert [(record.name, record.accuracy, record.num_prompts) for record in records] == [("b", 1.0, 3), ("a", 0.5, 1)]
    assert {lease.min_version for lease in _leases(evaluation)} == {3}


def test_more_samples_than_a_worker_can_report_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.eval: expected at most 131072 samples .*, got 131073"):
        Evaluation([EvalSet("a", PROMPTS[:1], 2**17), EvalSet("b", PROMPTS[:1])], lambda record: None)
