"""A run that publishes only some versions (weights.publish_every_n_steps)."""

from collections.abc import Callable

import pytest
from support.local_runs import Run, balanced

pytestmark = pytest.mark.slow


def test_only_versions_that_are_due_or_evaluated_sample_tokens(start: Callable[..., Run]) -> None:
    run = start(
        *("learner.num_train_steps=8", "weights.publish_every_n_steps=3", "algorithm.max_staleness=2"),
        *("evaluation.every_n_versions=5", "algorithm.pipeline_depth=2"),
    )
    code, output = run.wait()
    assert code == 0, output
    sampled = {record.policy_version - 1 - by for record in run.records() for by in record.staleness_tokens}
    assert {0, 3} <= sampled <= {0, 3, 5, 6}
    assert max(record.staleness_max for record in run.records()) == 2
    summary = run.summary()
    assert [record["policy_version"] for record in summary["evaluation"]] == [0, 5, 8]
    assert balanced(summary["ledger"])
    assert summary["ledger"]["trained"] == 8 * 16


def test_the_last_version_is_evaluated_although_it_was_not_due(start: Callable[..., Run]) -> None:
    run = start(
        *("data.train.num_prompts=16", "data.num_epochs=1", "learner.num_train_steps=100"),
        *("weights.publish_every_n_steps=3", "algorithm.max_staleness=2", "evaluation.every_n_versions=0"),
    )
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert (summary["exit_reason"], summary["policy_version"]) == ("end_of_data", 4)
    assert [record["policy_version"] for record in summary["evaluation"]] == [0, 4]
