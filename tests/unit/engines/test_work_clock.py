"""The clock of an engine's work: idle, busy, and the time in decoding summed over completions."""

import pytest

from areal_rloo.engines import base
from areal_rloo.engines.base import WorkClock, WorkTimes


def test_times_add_up_by_the_number_of_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(base.time, "monotonic", lambda: now_s)
    clock = WorkClock()
    now_s = 102.0
    clock.note(3)  # idle for 2 s
    now_s = 106.0
    clock.note(1)  # 3 requests for 4 s
    now_s = 107.0
    assert clock.times() == WorkTimes(idle_s=2.0, busy_s=5.0, decoding_s=13.0)
    clock.note(0)
    now_s = 117.0
    assert clock.times() == WorkTimes(idle_s=12.0, busy_s=5.0, decoding_s=13.0)
