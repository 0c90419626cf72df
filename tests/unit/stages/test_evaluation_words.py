"""The line of an evaluation: the interval of the accuracy."""

import math

import msgspec
import pytest

from areal_rloo.stages.evaluate import interval_of, words
from areal_rloo.telemetry.progress import evaluation_line
from areal_rloo.telemetry.records import EvalRecord


def _measured(record: EvalRecord, num_right: int, num: int) -> EvalRecord:
    """A sample for each prompt: the standard error of a share."""
    mean = num_right / num
    error = math.sqrt(mean * (1 - mean) / num)
    return msgspec.structs.replace(record, accuracy=mean, reward=mean, reward_error=error, num_prompts=num)


@pytest.mark.parametrize(
    ("num_right", "num", "least", "most"),  # of scipy: binomtest(num_right, num).proportion_ci(method="wilson")
    [(0, 20, 0.0, 0.16113), (20, 20, 0.83887, 1.0), (10, 20, 0.29930, 0.70070), (45, 50, 0.78640, 0.95652)],
)
def test_the_interval_of_a_share_is_wilsons(
    eval_record: EvalRecord, num_right: int, num: int, least: float, most: float
) -> None:
    record = _measured(eval_record, num_right, num)
    assert interval_of(record) == (pytest.approx(least, abs=1e-4), pytest.approx(most, abs=1e-4))
    assert f"({least:.3f} to {most:.3f})" in words(record)


def test_samples_of_a_prompt_that_agree_count_once(eval_record: EvalRecord) -> None:
    """The error over prompts is that of 20 prompts, however many samples each has."""
    single = _measured(eval_record, 10, 20)
    assert interval_of(msgspec.structs.replace(single, num_prompts=20, num_samples=8)) == interval_of(single)


def test_a_mean_reward_beyond_one_has_a_normal_interval(eval_record: EvalRecord) -> None:
    record = msgspec.structs.replace(eval_record, accuracy=math.nan, reward=3.0, reward_error=0.5)
    assert interval_of(record) == (pytest.approx(2.02), pytest.approx(3.98))
    assert words(record).startswith("arithmetic: reward 3.000 (2.020 to 3.980); 200 prompts")


def test_a_reward_with_partial_credit_is_no_accuracy(eval_record: EvalRecord) -> None:
    record = msgspec.structs.replace(eval_record, accuracy=0.5, reward=0.75)
    assert words(record).startswith("arithmetic: reward 0.750 (0.683 to 0.817); accuracy 0.500, 200 prompts")
    assert evaluation_line(record) == "evaluation: version 4, arithmetic reward 0.750, accuracy 0.500"
    assert evaluation_line(eval_record) == "evaluation: version 4, arithmetic accuracy 0.625"
