"""The metric of skipped steps, which the train step itself feeds."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from areal_rloo.telemetry.metric import PREFIX
from areal_rloo.telemetry.metrics import LearnerMetrics
from areal_rloo.telemetry.records import TrainRecord

MakeTrainRecord = Callable[..., TrainRecord]


def test_skipped_steps_are_shown_before_the_next_record(make_train_record: MakeTrainRecord) -> None:
    """A train step whose optimizer steps are all skipped has no record."""
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry, {"skipped_steps": 5})
    metrics.skipped_steps(7)
    assert registry.get_sample_value(f"{PREFIX}skipped_steps_total") == 2
    metrics.train_step(make_train_record(skipped_steps=7))
    assert registry.get_sample_value(f"{PREFIX}skipped_steps_total") == 2
    metrics.skipped_steps(8)
    assert registry.get_sample_value(f"{PREFIX}skipped_steps_total") == 3
