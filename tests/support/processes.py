"""Processes of tests: how to start them quickly, lists of them that survive a zombie, and the ends of their logs."""

import multiprocessing
from collections.abc import Iterable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil


def quickly_started() -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported torch: 0.1 s instead of 4 s each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["areal_rloo.learner.building", "areal_rloo.weights.receive"])
    return context


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; an empty list if the process has ended, even if nobody has reaped it."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # ZombieProcess is a NoSuchProcess
        return []


def children_with(word: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """List the children of `parent` (default: this process) that have `word` among the words of their command."""
    return processes_with([word], (parent or psutil.Process()).children())


def processes_with(words: Iterable[str], among: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """List the processes (default: of this machine) that have all these words in their command."""
    wanted = set(words)
    everywhere = psutil.process_iter() if among is None else among
    return [process for process in everywhere if wanted <= set(command_of(process))]


def wire_port(learner: psutil.Process) -> int | None:
    """Return the port of the wire, of a run with wire.transport=tcp; None if the process has ended."""
    words = (word for word in command_of(learner) if word.startswith("--wire=tcp://"))
    return next((int(word.rpartition(":")[2]) for word in words), None)


def ends_of_logs(files: Iterable[Path], *, num_lines: int = 60) -> str:
    """Return the name and the last lines of each file that is not empty."""
    ends = ((file.name, file.read_text(errors="replace").splitlines()[-num_lines:]) for file in sorted(files))
    return "\n".join(f"--- {name}:\n" + "\n".join(lines) for name, lines in ends if lines)
