"""Processes that take turns: `turn_takers.py KIND RUN_FOLDER [LOG]`, and how tests drive them.

`learner` and `engine` take turns without end, and log each: `begin` after the lock, `end` before the release, with
seconds of the monotonic clock. `forking` is an engine with a child; `looking` looks for the learner's wish without
end. `busy` is an engine that says without end that it is busy. `told` is a learner that a test tells to take and to
give the turn.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_rloo.turns import EngineTurn, LearnerTurn

BUSY_S = 10.0  # how long a told learner waits for a busy engine


class Taker:
    """A process that takes turns without end; its log stays after a kill."""

    def __init__(self, kind: str, run_folder: Path, log: Path) -> None:
        self.log = log
        log.touch()
        self._killed_s: float | None = None
        self.process = subprocess.Popen([sys.executable, __file__, kind, str(run_folder), str(log)])

    def kill(self) -> None:
        """Kill the process. A turn without an end lasted at least until the kill."""
        self._killed_s = time.monotonic()
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def num_turns(self) -> int:
        return self.log.read_text().count("begin")

    def intervals(self) -> list[tuple[float, float]]:
        """Return begin and end of each turn."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        times = [float(seconds) for _, seconds in lines]
        assert [word for word, _ in lines] == (["begin", "end"] * len(lines))[: len(lines)]
        last = [] if len(times) % 2 == 0 else [time.monotonic() if self._killed_s is None else self._killed_s]
        return list(zip(times[::2], [*times[1::2], *last], strict=True))


class ToldLearner:
    """A learner in a process of its own, which takes and gives the turn when a test says so."""

    def __init__(self, run_folder: Path, patience_s: float) -> None:
        command = [sys.executable, __file__, "told", str(run_folder), str(patience_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def take(self) -> int:
        """Take the turn; return the number of missed turns so far."""
        return int(self._tell("take"))

    def give(self) -> None:
        self._tell("give")

    def begin_to_take(self) -> None:
        """Take the turn without waiting here."""
        assert self.process.stdin is not None
        print("take", file=self.process.stdin, flush=True)

    def _tell(self, word: str) -> str:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer, "the process has ended"
        return answer


@contextmanager
def told_learner(run_folder: Path, *, patience_s: float = 60.0) -> Iterator[ToldLearner]:
    learner = ToldLearner(run_folder, patience_s)
    try:
        yield learner
    finally:
        learner.process.kill()
        learner.process.communicate()


def _say(log: int, word: str) -> None:
    os.write(log, f"{word} {time.monotonic():.9f}\n".encode())


def _learn(run_folder: Path, log: int) -> None:
    turn = LearnerTurn(run_folder, free=lambda: None)
    while True:
        with turn:
            _say(log, "begin")
            time.sleep(0.003)
            _say(log, "end")
        assert turn.statistics().missed == 0
        time.sleep(0.002)


def _generate(run_folder: Path, log: int, *, forks: bool = False) -> None:
    turn = EngineTurn(run_folder)
    while True:
        if turn.held and turn.is_wanted():
            _say(log, "end")
            turn.give()
        elif not turn.held and turn.take():
            _say(log, "begin")
            if forks and os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        time.sleep(0.001)


def _look(run_folder: Path, log: int) -> None:
    turn = EngineTurn(run_folder)
    _say(log, "begin")
    while True:
        turn._files.wanted.is_locked()


def _be_busy(run_folder: Path, log: int) -> None:
    turn = EngineTurn(run_folder)
    assert turn.take()
    _say(log, "begin")
    while True:
        turn.says_busy()
        time.sleep(0.01)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _obey(run_folder: Path, patience_s: float) -> None:
    turn = LearnerTurn(run_folder, free=lambda: None, patience_s=patience_s, busy_s=BUSY_S)
    _write("ready")
    for line in sys.stdin:
        if line.strip() == "take":
            turn.__enter__()
        else:
            turn.__exit__(None, None, None)
        _write(str(turn.statistics().missed))


if __name__ == "__main__":
    kind, folder, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if kind == "told":
        _obey(folder, float(last))
    descriptor = os.open(last, os.O_WRONLY | os.O_APPEND)
    if kind == "learner":
        _learn(folder, descriptor)
    if kind == "busy":
        _be_busy(folder, descriptor)
    if kind == "looking":
        _look(folder, descriptor)
    _generate(folder, descriptor, forks=kind == "forking")
