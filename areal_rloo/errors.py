"""Every error the package raises on purpose, as one tree.

ArealRlooError
├── UserError            something the user can mend: one line, exit code 2, no traceback
│   ├── ConfigError          a config file or an override
│   ├── DataError            a data file or one of its rows
│   ├── ModelError           a model folder or an architecture
│   ├── PreflightError       ports, devices, disk: what is checked before anything starts
│   └── CheckpointError      a checkpoint to resume from
├── WireError            messages between the learner and a rollout worker
│   ├── DecodeError          bytes that are not a valid message
│   └── WireVersionError     a peer that speaks another wire version
├── WeightsError         a broadcast that failed
│   ├── ChecksumError        what arrived is not what was sent
│   └── WentBackError        the learner began again at an earlier version
├── EngineError          an engine that cannot go on
├── SampleError          a sample that will not be finished, with the reason of its drop
│   ├── GenerationError      a completion that the engine cannot make
│   ├── RewardError          a completion that got no reward
│   └── EpisodeError         an episode that cannot go on
└── TrainingError        training that cannot go on (see `learner.max_skipped_steps`)

An exception of the user's code becomes the detail of a `SampleError` through `described`.
"""

import traceback

_MOST_SUMMARY, _MOST_TRACEBACK = 500, 4000  # characters


EXIT_RANK_LOST = 3  # of a learner rank that ended because another did
EXIT_WENT_BACK = 4  # of a rollout worker that ended because the learner went back to an earlier version


class ArealRlooError(Exception):
    """Root of the tree."""


class UserError(ArealRlooError):
    """The user can mend it; programs print it as one line `error: ...` and exit with 2."""


class ConfigError(UserError):
    """A config file or an override names a wrong key or value."""


class DataError(UserError):
    """A data file is missing, or a row of it has not the fields its task needs."""


class ModelError(UserError):
    """A model folder is missing, unreadable, or of an architecture that cannot be served."""


class PreflightError(UserError):
    """A port, a device or a disk is not as the plan needs it."""


class CheckpointError(UserError):
    """There is no whole checkpoint to resume from, or it belongs to another run."""


class WireError(ArealRlooError):
    """The learner and a rollout worker do not understand each other."""


class DecodeError(WireError):
    """Bytes from the wire are not a valid message; says which field and why."""


class WireVersionError(WireError):
    """The peer speaks another wire version."""


class WeightsError(ArealRlooError):
    """A broadcast of weights failed."""


class ChecksumError(WeightsError):
    """The weights that arrived are not the weights that were sent."""


class WentBackError(WeightsError):
    """The learner began again at a version before ours, which no version of it follows from."""


class EngineError(ArealRlooError):
    """An engine cannot serve a request."""


class SampleError(ArealRlooError):
    """A sample will not be finished; `reason` is the label of its drop, `detail` what happened in a line, and perhaps a
    traceback below it, `completion` the text there was of it."""

    def __init__(self, reason: str, detail: str, *, completion: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.completion = completion

    @property
    def summary(self) -> str:
        """What happened, in one line."""
        return self.detail.strip().partition("\n")[0]


class GenerationError(SampleError):
    """The engine cannot make this completion, and goes on with others."""

    def __init__(self, detail: str) -> None:
        super().__init__("generation_failed", detail)


class RewardError(SampleError):
    """A completion got no reward."""


class EpisodeError(SampleError):
    """An episode cannot go on: its context is full, its agent failed."""


class TrainingError(ArealRlooError):
    """Training cannot go on."""


def first_line(error: BaseException) -> str:
    """What a library raised, without the pages that some put below it; its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def described(error: BaseException) -> str:
    """The detail of a sample that the user's code failed: a line that says what was raised, and the traceback below."""
    summary = f"{type(error).__name__}: {error}".partition("\n")[0]
    return shortened(f"{summary}\n{''.join(traceback.format_exception(error)).rstrip()}")


def shortened(detail: str) -> str:
    """A detail that can be sent: its first line, and of what stands below it the end, where a traceback says most."""
    summary, newline, rest = detail.strip().partition("\n")
    return summary[:_MOST_SUMMARY] + newline + rest[-_MOST_TRACEBACK:]
