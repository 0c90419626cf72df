"""Turns of the learner and of engines: never both, whatever process is killed or stopped, and never a turn lost."""

import errno
import fcntl
import math
import os
import random
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.requests_to_serve import wait_until
from support.turn_takers import BUSY_S, Taker, told_learner

from areal_rloo import turns
from areal_rloo.errors import PreflightError
from areal_rloo.turns import EngineTurn, LearnerTurn


class _Takers:
    """The processes of a test, killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Taker] = []

    def start(self, kind: str) -> Taker:
        self.all.append(Taker(kind, self.folder, self.folder / f"{len(self.all)}-{kind}.log"))
        return self.all[-1]

    def intervals(self, kind: str) -> list[tuple[float, float]]:
        return [interval for taker in self.all if kind in taker.log.name for interval in taker.intervals()]


@pytest.fixture
def takers(tmp_path: Path) -> Iterator[_Takers]:
    found = _Takers(tmp_path)
    yield found
    for taker in found.all:
        taker.kill()


def _go_on(*running: Taker) -> None:
    """Wait until each process takes further turns."""
    before = [taker.num_turns() for taker in running]
    ends_s = time.monotonic() + 60
    while any(taker.num_turns() < num + 2 for taker, num in zip(running, before, strict=True)):
        assert time.monotonic() < ends_s, "a process gets no turn"
        time.sleep(0.01)


def _never_both(takers: _Takers) -> int:
    """Check that no turn of the learner overlaps a turn of an engine; return the number of the learner's turns."""
    learners = takers.intervals("learner")
    for begin, end in learners:
        assert not [one for one in takers.intervals("engine") if one[0] < end and begin < one[1]]
    return len(learners)


@pytest.mark.parametrize("seed", range(3))
def test_kills_and_stops_lose_no_turn_and_let_no_two_overlap(seed: int, takers: _Takers) -> None:
    chance = random.Random(seed)
    kinds = ("learner", "engine", "engine")
    running = [takers.start(kind) for kind in kinds]
    _go_on(*running)
    for _ in range(15):
        time.sleep(chance.random() * 0.03)
        index = chance.randrange(len(kinds))
        if chance.random() < 0.5:
            running[index].kill()
            running[index] = takers.start(kinds[index])
        else:
            running[index].signal(signal.SIGSTOP)
            time.sleep(chance.random() * 0.05)
            running[index].signal(signal.SIGCONT)
    _go_on(*running)
    for taker in running:
        taker.kill()
    assert _never_both(takers) > 10
    with told_learner(takers.folder) as learner:
        assert learner.take() == 0, "no turn of a dead process is left"


def test_engines_have_turns_together(takers: _Takers) -> None:
    engines = [takers.start("engine") for _ in range(2)]
    while not all(engine.num_turns() for engine in engines):
        time.sleep(0.01)
    assert all("end" not in engine.log.read_text() for engine in engines)


def test_the_patience_counts_from_the_last_word_of_a_busy_engine(takers: _Takers) -> None:
    busy = takers.start("busy")
    wait_until(lambda: busy.num_turns() > 0)
    with told_learner(takers.folder, patience_s=1.0) as learner:
        for missed in (1, 2):  # also after a missed turn
            learner.begin_to_take()
            assert not select.select([learner.process.stdout], [], [], 3.0)[0], "the learner waits for the engine"
            began_s = time.monotonic()
            busy.signal(signal.SIGSTOP)
            assert learner._answer() == str(missed), "a stopped process says nothing"
            assert 0.5 < time.monotonic() - began_s < BUSY_S / 2
            learner.give()
            busy.signal(signal.SIGCONT)


def test_the_wait_for_a_busy_engine_ends_with_its_limit_and_in_a_drain(takers: _Takers) -> None:
    busy = takers.start("busy")
    wait_until(lambda: busy.num_turns() > 0)
    drain_s = [math.inf]
    cases: list[tuple[dict[str, Any], float]] = [
        ({"busy_s": 0.8}, math.inf),
        ({}, 0.8),
    ]
    for options, drain_s[0] in cases:
        learner = LearnerTurn(takers.folder, free=lambda: None, drain_s=lambda: drain_s[0], **options)
        with learner:
            assert learner.statistics().missed == 1
            assert learner.statistics().wait_s > 0.7
        learner.close()
    learner = LearnerTurn(takers.folder, free=lambda: None, drain_s=lambda: drain_s[0])
    drain_s[0] = math.inf
    threading.Timer(0.5, drain_s.__setitem__, (0, 0.1)).start()  # the drain begins while the learner waits
    with learner:
        assert learner.statistics().missed == 1
    learner.close()


def test_a_time_in_which_all_stood_still_is_no_time_of_the_engine(takers: _Takers) -> None:
    """A container that is paused freezes learner and engine; then the engine gets its whole time again."""
    busy = takers.start("engine")
    wait_until(lambda: busy.num_turns() > 0)
    busy.signal(signal.SIGSTOP)
    with told_learner(takers.folder, patience_s=2.0) as learner:
        learner.begin_to_take()
        time.sleep(0.5)
        learner.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        learner.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        busy.signal(signal.SIGCONT)
        assert learner._answer() == "0", "the engine gives the turn in time"


def test_a_learner_with_few_cycles_has_limits_too(takers: _Takers) -> None:
    """Each look is late, as with a small quota of the processor; the engine hangs with the turn."""
    hanging = takers.start("engine")
    wait_until(lambda: hanging.num_turns() > 0)
    hanging.signal(signal.SIGSTOP)
    with told_learner(takers.folder, patience_s=2.0) as learner:
        learner.begin_to_take()
        for _ in range(20):
            learner.process.send_signal(signal.SIGSTOP)
            time.sleep(0.62)
            learner.process.send_signal(signal.SIGCONT)
            time.sleep(0.03)
        learner.process.send_signal(signal.SIGSTOP)
        has_answered = bool(select.select([learner.process.stdout], [], [], 0)[0])
        learner.process.send_signal(signal.SIGCONT)
        assert has_answered, "the learner waits without end"
        assert learner._answer() == "1"


def test_a_child_does_not_keep_the_turn_of_a_dead_worker(takers: _Takers) -> None:
    engine = takers.start("forking")
    while not engine.num_turns():
        time.sleep(0.01)
    time.sleep(0.1)
    engine.kill()
    with told_learner(takers.folder, patience_s=5) as learner:
        assert learner.take() == 0


def test_a_stopped_engine_costs_the_learner_a_limited_time(takers: _Takers) -> None:
    engine = takers.start("engine")
    while not engine.num_turns():
        time.sleep(0.01)
    engine.signal(signal.SIGSTOP)
    with told_learner(takers.folder, patience_s=0.3) as learner:
        assert learner.take() == 1
        learner.give()
        engine.signal(signal.SIGCONT)
        assert learner.take() == 1, "the engine gives the turn again"
        learner.give()
    assert len(engine.intervals()) > 0


def test_engines_that_look_hold_nothing_wherever_they_are_stopped(takers: _Takers) -> None:
    """A look that shares the lock for a moment would keep it, if the engine is stopped just then."""
    looking = takers.start("looking")
    wait_until(lambda: looking.num_turns() > 0)
    learner = LearnerTurn(takers.folder, free=lambda: None)
    for _ in range(3_000):
        assert learner._files.wanted.lock(fcntl.LOCK_EX)
        learner._files.wanted.unlock()
    learner.close()


def test_the_second_wait_for_a_stopped_engine_is_short(
    takers: _Takers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "_SHORT_PATIENCE_S", 0.01)
    engine = takers.start("engine")
    wait_until(lambda: engine.num_turns() > 0)
    engine.signal(signal.SIGSTOP)
    learner = LearnerTurn(takers.folder, free=lambda: None, patience_s=1.0)
    waits_s = [0.0]
    for _ in range(3):
        with learner:
            waits_s.append(learner.statistics().wait_s)
    assert waits_s[1] >= 1
    assert waits_s[3] - waits_s[1] < 1
    assert learner.statistics().missed == 3
    assert caplog.text.count("an engine has not given the device for") == 3
    engine.signal(signal.SIGCONT)
    monkeypatch.setattr(turns, "_SHORT_PATIENCE_S", 60)
    with learner:
        assert learner.statistics().taken == 1
    learner.close()


def test_an_engine_takes_no_turn_while_the_learner_waits_for_another(takers: _Takers) -> None:
    """Otherwise, two engines could keep the turn between them for ever."""
    other = takers.start("engine")
    wait_until(lambda: other.num_turns() > 0)
    other.signal(signal.SIGSTOP)
    engine = EngineTurn(takers.folder)
    with told_learner(takers.folder) as learner:
        learner.begin_to_take()
        wait_until(engine._files.wanted.is_locked)
        assert not engine.take()
    assert engine.take(), "the learner is dead"
    engine.close()


def test_an_engine_waits_for_a_stopped_learner_and_not_for_a_dead_one(takers: _Takers) -> None:
    engine = takers.start("engine")
    with told_learner(takers.folder) as learner:
        assert learner.take() == 0
        learner.process.send_signal(signal.SIGSTOP)
        num = engine.num_turns()
        time.sleep(0.3)
        assert engine.num_turns() == num
        learner.process.kill()
        wait_until(lambda: engine.num_turns() > num)


def test_an_engine_says_how_long_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "_SAY_EVERY_S", 0.05)
    engine = EngineTurn(tmp_path)
    with told_learner(tmp_path) as learner, caplog.at_level("INFO", logger="areal_rloo"):
        assert learner.take() == 0
        assert engine.is_wanted()
        for _ in range(20):
            assert not engine.take()
            time.sleep(0.01)
        learner.give()
        assert engine.take()
    assert 2 <= caplog.text.count("for the end of the learner's step") <= 4
    assert 0.2 <= engine.waited_s < 10
    engine.close()


def test_a_wish_is_seen_at_most_every_few_milliseconds(tmp_path: Path) -> None:
    engine = EngineTurn(tmp_path)
    assert engine.take()
    with told_learner(tmp_path) as learner:
        learner.begin_to_take()
        seen = 0
        began_s = time.monotonic()
        while (now_s := time.monotonic()) - began_s < 0.2:
            seen += engine.is_wanted()
        assert 1 <= seen <= (now_s - began_s) / turns.LOOK_EVERY_S + 1
    engine.close()


def test_an_error_of_a_step_frees_no_memory_and_gives_the_turn(tmp_path: Path) -> None:
    freed, told = [], []
    turn = LearnerTurn(tmp_path, free=lambda: freed.append(True), tell=told.append)
    with turn:
        assert told == [True]
    assert (freed, told) == ([True], [True, False])
    with pytest.raises(ValueError, match="step"), turn:
        raise ValueError("step")
    assert freed == [True], "the ranks may be gone"
    with told_learner(tmp_path, patience_s=5) as learner:
        assert learner.take() == 0
    assert turn.statistics().taken == 2
    turn.close()


def test_the_folder_ends_with_the_last_process(tmp_path: Path) -> None:
    engine = EngineTurn(tmp_path)
    path = engine._files._folder.path
    learner = LearnerTurn(tmp_path, free=lambda: None)
    assert path.stat().st_mode & 0o777 == 0o700
    engine.close()
    assert path.exists()
    learner.close()
    assert not path.exists()


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_shortage_of_descriptors_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th opening fails, for every n."""
    monkeypatch.setattr("areal_rloo.files.memory_folder", lambda: tmp_path)
    opens, num_open = os.open, _num_descriptors()
    num_refused = 0
    while True:
        left = num_refused

        def refuses(*arguments: Any, **options: Any) -> int:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EMFILE, "Too many open files")
            return opens(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuses)
            try:
                engine = EngineTurn(tmp_path)
            except PreflightError as error:
                assert error.exit_code == 1
            else:
                break
        assert (list(tmp_path.iterdir()), _num_descriptors()) == ([], num_open)
        num_refused += 1
    engine.close()
    assert num_refused >= 4
    assert (list(tmp_path.iterdir()), _num_descriptors()) == ([], num_open)


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    engine = EngineTurn(tmp_path)
    path = engine._files._folder.path
    engine.close()
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(PreflightError, match=r"rollout\.share_devices: in_turns needs a folder in memory"):
        EngineTurn(tmp_path)
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(PreflightError, match="in_turns needs a folder"):
        EngineTurn(tmp_path)
    path.unlink()
