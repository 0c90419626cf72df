"""The counts of the ledger, and the statistics of the intake.

The counts of workers may be wrong: a count never goes back, and never jumps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from areal_rloo.intake.prompts import Prompt
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Trajectory
from areal_rloo.wire.messages import MOST_COUNT, MOST_SECONDS, Work

# Between two messages: far above those of any engine.
_MOST_TOKENS, _MOST_S, _MOST_DECODING_S = 10**12, 1e7, 1e11


@dataclass(frozen=True, slots=True)
class Drop:
    """A dropped sample, for inspection; `trajectories` is empty if none arrived."""

    group_id: int
    sample_index: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    reason: str
    detail: str


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counts since the beginning of the run, in samples unless named otherwise."""

    admitted_groups: int = 0  # the next group id, too
    dropped_groups: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    dropped_tokens: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """State of the intake now. The times and `generated_tokens` are sums over workers since the start."""

    ledger: LedgerCounts
    num_workers: int
    num_behind: int  # most versions that a worker has missed
    rollout_idle_s: float
    generated_tokens: int
    rollout_busy_s: float
    decoding_s: float
    repeated_results: int
    filtered_prompts: int
    truncated_prompts: int
    epoch: float


def grown(last: Work, now: Work) -> Work:
    """Return the new counts of a process; a count that went back or jumped stays as before."""
    has_progress = 0 < now.generated_tokens - last.generated_tokens <= _MOST_TOKENS
    return Work(
        _grown(last.idle_s, now.idle_s, _MOST_S),
        now.generated_tokens if has_progress else last.generated_tokens,
        _grown(last.busy_s, now.busy_s, _MOST_S),
        _grown(last.decoding_s, now.decoding_s, _MOST_DECODING_S),
    )


def added(total: Work, processes: Iterable[tuple[Work, Work]]) -> Work:
    """Add the growth of each process, from the first counts to the last, to a total."""
    idle_s, busy_s, decoding_s = total.idle_s, total.busy_s, total.decoding_s
    generated_tokens = total.generated_tokens
    for first, last in processes:
        idle_s += last.idle_s - first.idle_s
        busy_s += last.busy_s - first.busy_s
        decoding_s += last.decoding_s - first.decoding_s
        generated_tokens += last.generated_tokens - first.generated_tokens
    idle_s, busy_s, decoding_s = (min(seconds, MOST_SECONDS) for seconds in (idle_s, busy_s, decoding_s))
    return Work(idle_s, min(generated_tokens, MOST_COUNT), busy_s, decoding_s)


def _grown(last_s: float, now_s: float, most_s: float) -> float:
    return now_s if 0 <= now_s - last_s <= most_s else last_s
