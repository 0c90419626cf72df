"""The boundaries that the fuzzer tries: for each, a function of any bytes, and bytes to begin with.

A function returns if the bytes are good, or if they are refused with the error of their boundary. Any other exception
is a defect. The functions also check what must hold for good bytes: a decoded message encodes to the same message.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
_MODULES = {  # a process imports only the module of its target: torch takes seconds
    "messages": ("worker_messages", "learner_messages", "turns"),
    "texts": ("configs", "answers", "chat_requests"),
    "servers": ("server_answers",),
    "folders": ("checkpoints", "batches", "models", "run_folders"),
}
NAMES = [name for names in _MODULES.values() for name in names]


@dataclass(frozen=True, slots=True)
class Target:
    """`try_bytes` raises an exception, other than those it expects, only for a defect. `seeds` are good bytes."""

    try_bytes: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]


def target(name: str) -> Target:
    """Return a target by name."""
    module = next(module for module, names in _MODULES.items() if name in names)
    found: Target = importlib.import_module(f"fuzz.{module}").TARGETS[name]
    return found


@cache
def work_folder() -> Path:
    """Make a folder for the files of this process; the folder lives as long as the process."""
    folder = tempfile.mkdtemp(prefix="areal_rloo-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def corpus_file(name: str) -> Path:
    """Return the file with the inputs that are kept for a target: a zip, because the inputs are many and small."""
    return HERE / "corpus" / f"{name}.zip"


def corpus(name: str) -> list[bytes]:
    """Return the seeds and the kept inputs of a target."""
    kept = corpus_file(name)
    if not kept.is_file():
        return [*target(name).seeds()]
    with zipfile.ZipFile(kept) as inputs:
        return [*target(name).seeds(), *(inputs.read(member) for member in sorted(inputs.namelist()))]


def keep(name: str, inputs: Iterable[bytes]) -> None:
    """Replace the kept inputs of a target. The same inputs give the same file."""
    corpus_file(name).parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(corpus_file(name), "w", zipfile.ZIP_DEFLATED) as file:
        for content in sorted(set(inputs)):
            file.writestr(zipfile.ZipInfo(hashlib.sha1(content, usedforsecurity=False).hexdigest()), content)
