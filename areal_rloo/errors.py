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
│   └── ChecksumError        what arrived is not what was sent
├── EngineError          an engine that cannot serve a request
├── RewardError          a completion that got no reward
└── TrainingError        training that cannot go on (see `learner.max_skipped_steps`)
"""


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


class EngineError(ArealRlooError):
    """An engine cannot serve a request."""


class RewardError(ArealRlooError):
    """A completion got no reward; `reason` is the label of its drop, `detail` what happened."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class TrainingError(ArealRlooError):
    """Training cannot go on."""
