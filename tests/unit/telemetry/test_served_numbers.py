"""Numbers at /metrics that alarms compare: the wanted workers, the length of a long step, labels of long ago."""

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from areal_rloo.learner.reporting import Reporter
from areal_rloo.telemetry.metrics import LearnerMetrics
from areal_rloo.telemetry.records import TrainRecord
from areal_rloo.telemetry.wanted import note_wanted, read_wanted


def test_the_wanted_number_of_workers_is_the_launchers(tmp_path: Path) -> None:
    assert read_wanted(tmp_path, 4).num_workers == 4
    note_wanted(tmp_path, 2)
    assert read_wanted(tmp_path, 4).num_workers == 2
    (tmp_path / "workers.json").write_text("{")
    assert read_wanted(tmp_path, 4).num_workers == 4


@pytest.mark.parametrize(("steps", "long"), [([30.0], 30.0), ([1800.0, 9.0], 9.0), ([9.0, 8.0, 1800.0, 7.0], 9.0)])
def test_a_single_standstill_does_not_hide_the_next(steps: list[float], long: float) -> None:
    reporter: Any = SimpleNamespace(_stepped=datetime.now(UTC), _steps_left=5, _steps_s=deque(steps, maxlen=10))
    assert Reporter.pace(reporter).long_train_step_s == long


def test_a_staleness_that_the_newest_step_lacks_has_no_value(make_train_record: Callable[..., TrainRecord]) -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    for kl in ({0: 0.5, 1: 0.2}, {1: 0.3}):
        metrics.train_step(make_train_record(behaviour_kl_by_staleness=kl))
    name = "areal_rloo_behaviour_kl_by_staleness"
    assert registry.get_sample_value(name, {"staleness": "0"}) is None
    assert registry.get_sample_value(name, {"staleness": "1"}) == 0.3
