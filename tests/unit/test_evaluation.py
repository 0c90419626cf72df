"""Evaluation: every held-out prompt once, one at a time, and honest about the version."""

import numpy as np

from areal_rloo.learner.evaluation import Evaluation
from areal_rloo.learner.prompts import Prompt
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.messages import Lease

PROMPTS = [Prompt(0, index, (index + 1,), f"#### {index}") for index in range(4)]


def _finished(lease: Lease, reward: float, version: int) -> Trajectory:
    completion = Completion(np.zeros(2, np.int32), np.zeros(2, np.float32), np.full(2, version, np.int32), "stop")
    return Trajectory(lease.group_id, 0, np.array(lease.prompt_tokens, np.int32), completion, reward)


def test_accuracy_is_the_mean_reward_and_the_version_that_of_the_tokens() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation(PROMPTS, records.append)
    evaluation.request(5)
    leases = evaluation.take_leases(10)
    assert [lease.prompt_tokens for lease in leases] == [prompt.tokens for prompt in PROMPTS]
    assert {lease.min_version for lease in leases} == {5}
    for lease, reward in zip(leases, (1.0, 0.0, 1.0, 1.0), strict=True):
        evaluation.finish(_finished(lease, reward, 6))
    (record,) = records
    assert (record.accuracy, record.num_prompts, record.policy_version) == (0.75, 4, 6)
    assert evaluation.finished


def test_a_version_that_falls_due_meanwhile_waits_and_the_newest_wins() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation(PROMPTS, records.append)
    evaluation.request(1)
    first = evaluation.take_leases(10)
    evaluation.request(2)
    evaluation.request(3)
    assert evaluation.num_to_lease == 0
    for lease in first:
        evaluation.finish(_finished(lease, 1.0, 1))
    second = evaluation.take_leases(10)
    assert {lease.min_version for lease in second} == {3}
    assert not {lease.group_id for lease in first} & {lease.group_id for lease in second}
    assert [lease.prompt_tokens for lease in second] == [prompt.tokens for prompt in PROMPTS]
    assert not evaluation.finished


def test_a_lost_sample_is_leased_again_a_repeat_ignored_and_a_failure_counts_as_wrong() -> None:
    records: list[EvalRecord] = []
    evaluation = Evaluation(PROMPTS, records.append)
    evaluation.request(0)
    leases = evaluation.take_leases(10)
    evaluation.lose((leases[0].group_id, 0))
    assert evaluation.take_leases(10)[0].group_id == leases[0].group_id
    evaluation.fail((leases[0].group_id, 0))
    for lease in (*leases[1:], leases[1]):
        evaluation.finish(_finished(lease, 1.0, 0))
    assert [record.accuracy for record in records] == [0.75]


def test_without_held_out_prompts_there_is_nothing_to_wait_for() -> None:
    evaluation = Evaluation([], lambda record: None)
    evaluation.request(3)
    assert evaluation.finished
