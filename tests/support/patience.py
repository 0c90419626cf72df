"""Wait for a condition that must hold soon, on a machine that may be busy."""

import time
from collections.abc import Callable

PATIENCE_S = 240.0  # an SGLang server takes 20 s to start, minutes where the machine is busy


def eventually(condition: Callable[[], object], what: str) -> None:
    """Poll the condition until true; raise AssertionError with `what` after the deadline."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_s, what
        time.sleep(0.02)
