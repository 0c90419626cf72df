"""All exceptions of the package, as a tree.

ArealRlooError
├── UserError            a mistake of the user: one line, exit code 2, no traceback
│   ├── ConfigError          a config file or an override
│   ├── DataError            a data file or one of its rows
│   │   └── SourceError          an option of a source of prompts, raised by a task
│   ├── ModelError           a model folder or an architecture
│   ├── PreflightError       ports, devices, disk, checked before any process starts
│   ├── HostLostError        a host of the run is gone: no mistake, and exit code 1, but a line says all
│   ├── CheckpointError      a checkpoint to resume from
│   └── WireVersionError     a peer with another wire version
├── DecodeError          bytes of a file, a process, or a peer that are not a valid value
├── WeightsError         a failed broadcast
│   ├── ChecksumError        received weights that differ from the sent weights
│   └── WentBackError        a learner that restarted from an older version
├── CutOffError          a rollout worker whose answers the learner refused too often
├── EngineError          an engine that cannot continue
├── StartError           processes of rewards or tools cannot be started any more
├── SampleError          a sample that cannot be finished, with the drop reason
│   ├── GenerationError      a completion refused by the engine
│   ├── RewardError          a completion without a reward
│   └── EpisodeError         an episode that cannot continue
└── TrainingError        training that cannot continue (see `learner.max_skipped_steps`)
    └── UnsavedError         a last checkpoint that the disk refused

`raised` turns an exception of the user's code into the text of a `UserError`, `described` into the detail of a
`SampleError`; `defined_at` says where a function of the user is.
"""

import errno
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

_MOST_SUMMARY, _MOST_TRACEBACK = 500, 4000  # characters
_MOST_LINE, _MOST_SHOWN = 2000, 100  # characters
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")
# Beginnings of the names of files by other authors than the user.
_NOT_OF_THE_USER = (
    "<",
    f"{Path(__file__).parent}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
)

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ESTALE)

EXIT_RANK_LOST = 3  # exit code of a learner rank after the end of another rank
EXIT_WENT_BACK = 4  # exit code of a rollout worker after the learner restarted from an older version
EXIT_UNSAVED = 5  # exit code of a learner whose last checkpoint the disk refused; a restart would end in the same way


def install(extra: str) -> str:
    """Give the command that installs an extra into the environment of this process."""
    return f"{sys.executable} -m pip install 'areal-rloo[{extra}]'"


def is_shortage(error: BaseException) -> bool:
    """Return True if the machine lacked something for a moment, as far as an error tells: a later try may succeed.

    Looks at the causes, too: descriptors, processes and memory, or a network file system whose server was away.
    """
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if isinstance(at, OSError) and at.errno in _SHORTAGES:
            return True
        seen.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False


class ArealRlooError(Exception):
    """Root of the tree."""

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends with this error."""
        return 1


class UserError(ArealRlooError):
    """The user can fix this error. Programs print a single line `error: ...` and exit with code 2.

    If a shortage of the machine is the cause, it is no mistake, and the code is 1: a launcher starts the process again.

    The text is made a single line, whatever a file name, a value or another program's message has in it. `absent`: a
    library, a program or the weights of a model are not on this host; other hosts may have them.
    """

    @property
    def exit_code(self) -> int:
        return 1 if is_shortage(self) else 2

    def __init__(self, text: str, *, absent: bool = False) -> None:
        super().__init__(_in_one_line(text))
        self.absent = absent


class ConfigError(UserError):
    """A config file or an override names a wrong key or value."""


class DataError(UserError):
    """A data file is missing, or a row lacks fields that the task needs."""


class SourceError(DataError):
    """A task refuses an option of its source. The text begins with the option; the caller puts the source key before.

    So `parameters.size: expected ...` becomes `data.train.1.parameters.size: expected ...`.
    """


class ModelError(UserError):
    """A model folder is missing, unreadable, or of an unsupported architecture."""


class PreflightError(UserError):
    """A port, a device or a disk does not meet the plan."""


class HostLostError(UserError):
    """A host is gone, and the run cannot go on without it. It can on other hosts, so a program may start it again."""

    @property
    def exit_code(self) -> int:
        return 1


class CheckpointError(UserError):
    """No complete checkpoint exists, or the checkpoint belongs to another run."""


class DecodeError(ArealRlooError):
    """Bytes of a file, a process, or a peer are not a valid value; the text names the field and the reason.

    The text is a single line, because parts of the bytes may be in it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_in_one_line(text))


class WireVersionError(UserError):
    """The peer has another wire version: the hosts have different versions of areal_rloo."""


class WeightsError(ArealRlooError):
    """A broadcast of weights failed."""


class ChecksumError(WeightsError):
    """The received weights differ from the sent weights."""


class WentBackError(WeightsError):
    """The learner restarted from a version older than this worker's weights; the two histories have diverged."""


class CutOffError(ArealRlooError):
    """The learner reads no message of this process any more, because its answers broke their leases."""


class EngineError(ArealRlooError):
    """An engine cannot serve a request."""


class StartError(ArealRlooError):
    """Processes of rewards or tools cannot be started any more, although the first could; or the first was killed."""


class SampleError(ArealRlooError):
    """A sample cannot be finished.

    `reason` labels the drop. `detail` has a line of description, then perhaps a traceback. `completion` has the text
    generated before the error.
    """

    def __init__(self, reason: str, detail: str, *, completion: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.completion = completion

    @property
    def summary(self) -> str:
        """The first line of the detail."""
        return self.detail.strip().partition("\n")[0]

    @property
    def has_traceback(self) -> bool:
        """True if the detail has a traceback, of which `shortened` may have removed the beginning."""
        return '\n  File "' in self.detail


class GenerationError(SampleError):
    """The engine cannot generate this completion; other completions are not affected."""

    def __init__(self, detail: str) -> None:
        super().__init__("generation_failed", detail)


class RewardError(SampleError):
    """A completion has no reward."""


class EpisodeError(SampleError):
    """An episode cannot continue, for example because the context is full or the agent failed."""


class TrainingError(ArealRlooError):
    """Training cannot continue."""


class UnsavedError(TrainingError):
    """The disk refused the last checkpoint of the run."""

    @property
    def exit_code(self) -> int:
        return EXIT_UNSAVED


def shown(value: object) -> str:
    """Show a value in an error: a text as it is, else the representation; shortened, without line breaks.

    `***` stands for the name and the password in a URL.
    """
    text = _in_one_line(_LOGIN.sub("***@", value if isinstance(value, str) else repr(value)))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def printable(text: str) -> str:
    """Escape the characters without a safe look in a terminal, line breaks too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _in_one_line(text: str) -> str:
    """Join the lines of a text, and escape characters without a safe look in a terminal."""
    joined = printable(" ".join(text.split()) if "\n" in text or "\r" in text else text)
    return joined if len(joined) <= _MOST_LINE else f"{joined[:_MOST_LINE]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text; the class name if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def described(error: BaseException) -> str:
    """Describe an exception of the user's code: as `raised` on the first line, then the traceback."""
    place = _place(error)
    summary = _class_and_text(error).partition("\n")[0][: max(0, _MOST_SUMMARY - len(place))]
    return shortened(f"{summary}{place}\n{''.join(traceback.format_exception(error)).rstrip()}")


def raised(error: BaseException) -> str:
    """Describe an exception of the user's code: class, text, and the last line of the user's files.

    Leave out the class of a `UserError`: the text says everything.
    """
    return f"{error if isinstance(error, UserError) else _class_and_text(error)}{_place(error)}"


def defined_at(function: Callable[..., object]) -> str:
    """Give the line where the user's code defines a function, as ` (file:line)`; empty if Python does not know it."""
    source = function if inspect.isroutine(function) else type(function)
    try:
        file, (_, line) = inspect.getfile(inspect.unwrap(source)), inspect.getsourcelines(source)
    except (OSError, TypeError):
        return ""
    return "" if file.startswith(_NOT_OF_THE_USER) else f" ({file}:{line})"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(_NOT_OF_THE_USER)]
    return f" ({own[-1]})" if own else ""


def _class_and_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:  # noqa: BLE001 - `__str__` is the user's code, too
        return f"{type(error).__name__}, whose text raises {type(broken).__name__}"


def shortened(detail: str) -> str:
    """Shorten a detail for the wire: keep the first line and the end of the traceback, which has most information.

    Replace characters that UTF-8 cannot encode, so every detail can be sent.
    """
    encodable = detail.encode(errors="backslashreplace").decode()
    summary, newline, rest = encodable.strip().partition("\n")
    return summary[:_MOST_SUMMARY] + newline + rest[-_MOST_TRACEBACK:]
