"""Every reason of a drop in the code is a series at /metrics from the start."""

import re
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry

from areal_rloo import errors
from areal_rloo.rewards.request import FailureReason
from areal_rloo.telemetry.metric import PREFIX
from areal_rloo.telemetry.metrics import LearnerMetrics
from areal_rloo.telemetry.records import DROP_REASONS

PACKAGE = Path(errors.__file__).parent
_REASONS = re.compile(  # in code
    r'(?:Episode|Reward|Sample)Error\(\s*"(\w+)"|super\(\).__init__\("(\w+)", detail\)|^REASON = "(\w+)"'
    r'|drop(?:_group|_sample)?\([^"\n]*"(\w+)"|refuse_batch\("(\w+)"'
    r'|(?:return|else) "(low_reward_std|group_filter\w*)"',
    re.MULTILINE,
)


def test_every_reason_of_a_drop_is_there_at_0_from_the_start() -> None:
    """An alert on growth sees none in a series that begins with the first drop."""
    registry = CollectorRegistry()
    LearnerMetrics(registry)
    in_code = set(get_args(FailureReason))
    for path in PACKAGE.rglob("*.py"):
        in_code |= {name for names in _REASONS.findall(path.read_text()) for name in names if name}
    assert {"stale", "max_attempts", "non_finite", "options_changed", "low_reward_std", "tool_failed"} < in_code
    assert in_code == set(DROP_REASONS)
    for reason in DROP_REASONS:
        assert registry.get_sample_value(f"{PREFIX}ledger_dropped_total", {"reason": reason}) == 0
        assert registry.get_sample_value(f"{PREFIX}ledger_dropped_tokens_total", {"reason": reason}) == 0
