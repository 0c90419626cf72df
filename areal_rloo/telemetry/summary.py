"""summary.json: a run in a page of numbers. The learner writes the file; if the learner was killed, the launcher."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, LedgerCounts, TrainRecord

SUMMARY_NAME = "summary.json"
_EARLIER_NAME = ".summary-before.json"
_EVALUATION = (
    *("name", "policy_version", "accuracy", "reward", "num_prompts", "num_samples", "pass_share", "majority_share"),
)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run. Counts are in samples or tokens, times in seconds."""

    exit_reason: str
    policy_version: int
    evaluations: Sequence[EvalRecord]
    ledger: LedgerCounts
    staleness_tokens: Mapping[int, int]  # trained tokens by staleness
    trained_tokens: int
    masked_tokens: int
    generated_tokens: int
    warm_start_s: float
    wall_s: float
    learner_idle_s: float
    rollout_idle_s: float  # all workers, like the next
    rollout_busy_s: float
    skipped_steps: int
    failed_checkpoints: int

    def write(self, path: Path) -> None:
        """Write summary.json.

        Raises:
            OSError: the disk refuses.
        """
        num_trained = max(1, self.trained_tokens)
        numbers = {
            "exit_reason": self.exit_reason,
            "num_train_steps": self.policy_version,
            "policy_version": self.policy_version,
            "evaluation": [{name: getattr(record, name) for name in _EVALUATION} for record in self.evaluations],
            "ledger": self.ledger,
            "staleness": {
                "max_trained": max(self.staleness_tokens, default=0),
                "mean_trained": sum(s * n for s, n in self.staleness_tokens.items()) / num_trained,
                "masked_token_share": self.masked_tokens / max(1, self.trained_tokens + self.masked_tokens),
                "by_value": {str(s): self.staleness_tokens[s] for s in sorted(self.staleness_tokens)},
            },
            "tokens": {"generated": self.generated_tokens, "trained": self.trained_tokens},
            "time_s": {
                "warm_start": self.warm_start_s,
                "wall": self.wall_s,
                "learner_idle": self.learner_idle_s,
                "rollout_idle": self.rollout_idle_s,
                "rollout_busy": self.rollout_busy_s,
            },
            "skipped_steps": self.skipped_steps,
            "failed_checkpoints": self.failed_checkpoints,
        }
        write_atomically(path, msgspec.json.format(msgspec.json.encode(numbers), indent=2) + b"\n")


def exit_reason_of(folder: Path) -> str:
    """Give the reason in the summary of a run; empty while the run goes on."""
    with contextlib.suppress(OSError, DecodeError):
        return from_json(read_regular(folder / SUMMARY_NAME), _Ended).exit_reason
    return ""


class _Ended(msgspec.Struct):
    exit_reason: str


def set_summary_aside(folder: Path) -> None:
    """Set the summary of an earlier start aside, until the learner begins."""
    with contextlib.suppress(FileNotFoundError):
        (folder / SUMMARY_NAME).replace(folder / _EARLIER_NAME)


def forget_earlier_summary(folder: Path) -> None:
    """The learner begins: from now on, the summary of an earlier start, or of a learner that failed, is wrong."""
    for name in (_EARLIER_NAME, SUMMARY_NAME):
        (folder / name).unlink(missing_ok=True)


def has_earlier_summary(folder: Path) -> bool:
    """True if a summary is set aside: the learner has not begun."""
    return (folder / _EARLIER_NAME).exists()


def restore_earlier_summary(folder: Path) -> bool:
    """Put back what was set aside; False if the learner has begun, or if there was no summary."""
    with contextlib.suppress(OSError):
        (folder / _EARLIER_NAME).replace(folder / SUMMARY_NAME)
        return True
    return False


def summarize_killed(folder: Path, *, warm_start_s: float) -> Summary:
    """Summarize a run whose learner was killed, from the records.

    Raises:
        DataError: a record is of another version.
        OSError: the records cannot be read.
    """
    records = read_records(folder / "metrics.jsonl")
    steps = [record for record in records if isinstance(record, TrainRecord)]
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    if not steps:
        return _untrained(evaluations, warm_start_s)
    last = steps[-1]
    staleness_tokens: Counter[int] = Counter()
    for step in steps:
        staleness_tokens.update(step.staleness_tokens)
    return Summary(
        exit_reason="killed",
        policy_version=last.policy_version,
        evaluations=evaluations,
        ledger=last.ledger,
        staleness_tokens=staleness_tokens,
        trained_tokens=sum(step.trained_tokens for step in steps),
        masked_tokens=round(sum(_num_masked(step) for step in steps)),
        generated_tokens=last.generated_tokens,
        warm_start_s=warm_start_s,
        wall_s=last.wall_s,
        learner_idle_s=last.learner_idle_s,
        rollout_idle_s=last.rollout_idle_s,
        rollout_busy_s=last.rollout_busy_s,
        skipped_steps=last.skipped_steps,
        failed_checkpoints=last.failed_checkpoints,
    )


def _untrained(evaluations: Sequence[EvalRecord], warm_start_s: float) -> Summary:
    """Summarize a run without a train step."""
    return Summary(
        exit_reason="nothing_trained",
        policy_version=0,
        evaluations=evaluations,
        ledger=LedgerCounts(admitted=0, trained=0, dropped={}, dropped_tokens={}, buffered=0, in_flight=0),
        staleness_tokens={},
        trained_tokens=0,
        masked_tokens=0,
        generated_tokens=0,
        warm_start_s=warm_start_s,
        wall_s=0.0,
        learner_idle_s=0.0,
        rollout_idle_s=0.0,
        rollout_busy_s=0.0,
        skipped_steps=0,
        failed_checkpoints=0,
    )


def _num_masked(step: TrainRecord) -> float:
    share = step.masked_token_share
    return step.trained_tokens * share / (1 - share) if share < 1 else 0.0
