"""Callbacks that block an event loop: asyncio's debug mode warns of them, and a test fails."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LIMIT_S = 2.0  # generous: a busy machine takes the processor away from any callback
_WARNING = re.compile(r"Executing .* took ([\d.]+) seconds")


@dataclass
class BlockedLoops:
    """The warnings of asyncio's debug mode, which come for callbacks of 0.1 s or longer.

    Attributes:
        limit_s: a callback that takes this long or longer is a failure; a test may set another limit.
        warnings: seconds and text of every warning.
    """

    limit_s: float = LIMIT_S
    warnings: list[tuple[float, str]] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Take the warnings out of a text, for example the log of a process with PYTHONASYNCIODEBUG=1."""
        self.warnings += [(float(found[1]), found[0]) for found in _WARNING.finditer(text)]

    def check(self) -> None:
        """Raise AssertionError if a callback blocked a loop for `limit_s` or longer."""
        blocked = [text for seconds, text in self.warnings if seconds >= self.limit_s]
        assert not blocked, f"blocked an event loop for {self.limit_s} s or longer: {blocked}"


@contextmanager
def watched_loops(limit_s: float = LIMIT_S) -> Iterator[BlockedLoops]:
    """Collect the warnings of the loops of this process, which must be in debug mode."""
    blocked = BlockedLoops(limit_s)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: blocked.read(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield blocked
    finally:
        logger.removeHandler(handler)
